// Package label separates pods by SELinux, on nodes that have it: each pod has its own level,
// which is on record, and the files that are made for it get that level's label
// (docs/decisions/0033-selinux.md).
package label

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/selinux"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/records"
)

// Policy returns how a node separates pods; nil: it does not.
func Policy(host spec.Host, enable, confineHostNetwork bool) (*spec.SELinux, error) {
	if !host.SELinux || !enable {
		return nil, nil //nolint:nilnil // a node without SELinux is an ordinary one
	}
	contexts, err := selinux.Load()
	if err != nil {
		return nil, err
	}
	return &spec.SELinux{Contexts: *contexts, HostNetwork: confineHostNetwork}, nil
}

// Node labels what is made for pods. Without a policy it labels nothing.
type Node struct {
	Levels *selinux.Levels // of pods
	// Program is the program of infra containers. With SELinux it is a copy with a label that
	// containers may execute, which they may not be allowed to do with the installed file.
	Program string

	policy    *spec.SELinux
	installed string
}

// New returns a Node whose infra containers run program, or a copy of it in dir.
func New(policy *spec.SELinux, program, dir string) *Node {
	n := &Node{policy: policy, installed: program, Program: program}
	if policy == nil {
		n.Levels = selinux.NewLevels(0)
		return n
	}
	n.Levels, n.Program = selinux.NewLevels(policy.Categories), filepath.Join(dir, "pause")
	return n
}

// Allot gives a new pod its level: the one that its request names, or one that no other pod
// has. It stays the pod's until Levels.Free.
func (n *Node) Allot(id string, cfg *cri.PodSandboxConfig) (string, error) {
	if n.policy == nil {
		return "", nil
	}
	if level := cfg.GetLinux().GetSecurityContext().GetSelinuxOptions().GetLevel(); level != "" {
		n.Levels.Note(id, level)
		return level, nil
	}
	return n.Levels.Allot(id)
}

// Ignores reports whether the options for SELinux of a container or its pod have no effect.
func (n *Node) Ignores(pod *cri.PodSandboxConfig, c *cri.ContainerConfig) bool {
	asked := c.GetLinux().GetSecurityContext().GetSelinuxOptions() != nil || pod.GetLinux().GetSecurityContext().GetSelinuxOptions() != nil
	return n.policy == nil && asked
}

// Files returns the SELinux context of the files of a pod or, unless c is nil, of a container
// of it; empty: they need none. A context that the policy does not have is fault.Invalid.
func (n *Node) Files(pod *records.PodPlan, c *cri.ContainerConfig) (string, error) {
	label, err := n.policy.FileContext(pod.SELinuxLevel, pod.Config.M, c)
	if err == nil && label != "" && errors.Is(selinux.Accepted(label), selinux.ErrRefused) {
		err = fmt.Errorf("selinux_options: context %s: %w: %w", label, selinux.ErrRefused, fault.Invalid)
	}
	return label, err
}

// Relabel gives the container's label to its volumes that ask for it.
func (n *Node) Relabel(ctx context.Context, paths *conmon.HostPaths, pod *records.PodPlan, c *records.ContainerPlan) error {
	wanted := spec.Relabels(c.Config.M)
	if len(wanted) == 0 || !n.policy.Confines(pod.Config.M, c.Config.M) {
		return nil
	}
	return trace.Do(ctx, "relabel volumes", func(ctx context.Context) error { return paths.Relabel(ctx, c.MountLabel, wanted) })
}

// CopyProgram makes Program if it is a copy of the installed file. Containers that run an
// earlier copy keep it.
func (n *Node) CopyProgram() error {
	if n.policy == nil {
		return nil
	}
	partial := n.Program + ".partial"
	err := copyProgram(partial, n.installed)
	if err == nil {
		err = Set(partial, n.policy.ReadOnly)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(partial))
	}
	return os.Rename(partial, n.Program)
}

func copyProgram(to, from string) (err error) {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(target, source)
	return errors.Join(err, target.Close())
}

// Set sets the SELinux context of a file; an empty label leaves it as it is.
func Set(path, label string) error {
	if label == "" {
		return nil
	}
	if err := unix.Lsetxattr(path, "security.selinux", append([]byte(label), 0), 0); err != nil {
		return &os.PathError{Op: "set SELinux context " + label + " of", Path: path, Err: err}
	}
	return nil
}
