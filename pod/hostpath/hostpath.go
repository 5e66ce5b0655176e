// Package hostpath checks paths of the node that requests name. They may be missing, or on a
// file server that does not answer: a separate process accesses them before the server does.
package hostpath

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/trace"
)

// Paths checks the paths of one node.
type Paths struct {
	*conmon.HostPaths
	Reject func() []string // paths that are not created if they are missing
}

// Prepare starts to check the host paths of a container's mounts in the background. ensure
// waits for that and creates missing directories (like other runtimes; hostPath volumes of type
// "" rely on it). The caller must always call stop.
func (p *Paths) Prepare(ctx context.Context, mounts []*cri.Mount) (ensure func() error, stop func()) {
	var wanted, absent []string
	for _, m := range mounts {
		source := path.Clean(m.GetHostPath())
		if valid(source) && !slices.Contains(p.Reject(), source) {
			wanted = append(wanted, source)
		}
	}
	if len(wanted) == 0 {
		return func() error { return nil }, func() {}
	}
	looking, cancel := context.WithCancel(ctx)
	var group errgroup.Group
	group.Go(func() error {
		return trace.Do(looking, "check host paths", func(ctx context.Context) (err error) {
			absent, err = p.Absent(ctx, wanted)
			return err
		})
	})
	ensure = func() error {
		err := group.Wait()
		if err == nil && len(absent) > 0 {
			err = trace.Do(ctx, "make missing host paths", func(ctx context.Context) error {
				return p.MakeDirs(ctx, absent)
			})
		}
		return err
	}
	return ensure, func() {
		cancel()
		_ = group.Wait()
	}
}

// CheckDevices accesses the paths of devices, and others that are needed with them, in a
// separate process before the server does, since the access may hang.
func (p *Paths) CheckDevices(ctx context.Context, devices []*cri.Device, others ...string) error {
	var paths []string
	for _, d := range devices {
		paths = append(paths, d.GetHostPath())
	}
	paths = slices.DeleteFunc(append(paths, others...), func(name string) bool { return !valid(name) })
	if _, err := p.Look(ctx, paths); err != nil {
		return fmt.Errorf("check devices: %w", err)
	}
	return nil
}

// valid reports whether a path may be accessed; the request is refused otherwise.
func valid(hostPath string) bool {
	return path.IsAbs(hostPath) && !strings.ContainsRune(hostPath, 0)
}

// Explain adds to the error of a create what is known about the request's host paths: that one
// is missing and was not to be created or, if the runtime did not end in time, that some are on
// file servers.
func (p *Paths) Explain(ctx context.Context, mounts []*cri.Mount, cause error) error {
	if errors.Is(cause, fault.Timeout) {
		if suspects := onServers(mounts); len(suspects) > 0 {
			return fmt.Errorf("%w; check that the file server of %s is reachable", cause, strings.Join(suspects, ", "))
		}
		return cause
	}
	for _, m := range mounts {
		source := path.Clean(m.GetHostPath())
		if m.GetHostPath() == "" || !slices.Contains(p.Reject(), source) {
			continue
		}
		// A path that does not answer is not missing.
		if absent, _ := p.Look(context.WithoutCancel(ctx), []string{source}); len(absent) > 0 {
			return fmt.Errorf("host path %s does not exist, and pod.reject_missing_mounts keeps crius from creating it: %w (%w)", source, fault.Precondition, cause)
		}
	}
	return cause
}

// onServers returns the host paths whose file systems another machine or a process serves,
// according to the mount table. It accesses none of them.
func onServers(mounts []*cri.Mount) []string {
	var served []string
	for _, m := range mounts {
		if m.GetHostPath() == "" {
			continue
		}
		on, err := mount.Of(m.GetHostPath())
		if err != nil {
			continue
		}
		kind, _, _ := strings.Cut(on.Type, ".") // fuse.sshfs
		if slices.Contains([]string{"fuse", "fuseblk", "nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "glusterfs", "lustre", "afs", "ocfs2", "gfs2"}, kind) {
			served = append(served, fmt.Sprintf("%s (%s)", m.GetHostPath(), on.Type))
		}
	}
	return served
}

// CheckPropagation refuses a mount whose source cannot propagate as requested: without a shared
// (or, in one direction, slave) mount underneath nothing would propagate, and the pod would
// only find out much later.
func CheckPropagation(mounts []*cri.Mount) error {
	for _, m := range mounts {
		if m.GetPropagation() == cri.MountPropagation_PROPAGATION_PRIVATE || m.GetHostPath() == "" {
			continue
		}
		source, err := mount.Of(m.GetHostPath())
		if err != nil {
			return fmt.Errorf("read mount table: %w", err)
		}
		oneWay := m.GetPropagation() == cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
		if !source.Shared && !(oneWay && source.Slave) {
			return fmt.Errorf("mount of %s requires %s, but %s is a private mount; run mount --make-shared on it: %w",
				m.GetHostPath(), m.GetPropagation(), source.Point, fault.Invalid)
		}
	}
	return nil
}
