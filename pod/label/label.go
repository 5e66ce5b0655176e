// Package label keeps pods apart by SELinux, on nodes that have it: each pod has a level
// of its own, which is on its record, and the files that are made for it have that
// level's label (docs/decisions/0033-selinux.md).
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

// Policy is how a node separates pods; nil: it does not, or is not to.
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

// Node gives labels to what is made for pods. Without a policy it gives none.
type Node struct {
	Levels *selinux.Levels // that pods have
	// Program is what infra containers run: a copy with a label that containers
	// may execute, where the label of the installed one may not be.
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

// Allot gives a new pod its level: the one that its request names, or one that no
// other pod has. It is the pod's until Levels.Free.
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

// Files is the SELinux context of the files of a pod or, unless c is nil, of a
// container of it; empty: they need none. One that the policy does not have is
// fault.Invalid.
func (n *Node) Files(pod *records.PodPlan, c *cri.ContainerConfig) (string, error) {
	label, err := n.policy.FileContext(pod.SELinuxLevel, pod.Config.M, c)
	if err == nil && label != "" && errors.Is(selinux.Accepted(label), selinux.ErrRefused) {
		err = fmt.Errorf("selinux_options: context %s: %w: %w", label, selinux.ErrRefused, fault.Invalid)
	}
	return label, err
}

// Relabel gives the volumes of a container that ask for it the container's label.
func (n *Node) Relabel(ctx context.Context, paths *conmon.HostPaths, pod *records.PodPlan, c *records.ContainerPlan) error {
	wanted := spec.Relabels(c.Config.M)
	if len(wanted) == 0 || !n.policy.Confines(pod.Config.M, c.Config.M) {
		return nil
	}
	return trace.Do(ctx, "relabel volumes", func(ctx context.Context) error { return paths.Relabel(ctx, c.MountLabel, wanted) })
}

// CopyProgram makes Program, if that is a copy of what is installed. Containers that run
// an earlier copy keep it.
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

// Set gives a file its SELinux context, an empty one leaves it as it is.
func Set(path, label string) error {
	if label == "" {
		return nil
	}
	if err := unix.Lsetxattr(path, "security.selinux", append([]byte(label), 0), 0); err != nil {
		return &os.PathError{Op: "set SELinux context " + label + " of", Path: path, Err: err}
	}
	return nil
}
