package pod

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/selinux"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/spec"
)

// This file keeps pods apart by SELinux, on nodes that have it: each pod has a level
// of its own, which is on its record, and the files that are made for it have that
// level's label (docs/decisions/0033-selinux.md).

// newSELinux is how a node separates pods, nil on one that does not.
func newSELinux(cfg Config, host spec.Host) (*spec.SELinux, error) {
	if !host.SELinux || !cfg.SELinux {
		return nil, nil //nolint:nilnil // a node without SELinux is an ordinary one
	}
	contexts, err := selinux.Load()
	if err != nil {
		return nil, err
	}
	return &spec.SELinux{Contexts: *contexts, HostNetwork: !cfg.HostNetworkDisablesSELinux}, nil
}

func newLevels(node *spec.SELinux) *selinux.Levels {
	if node == nil {
		return selinux.NewLevels(0)
	}
	return selinux.NewLevels(node.Categories)
}

// allotLevel gives a new pod its level: the one that its request names, or one that no
// other pod has. Teardown frees it.
func (e *Engine) allotLevel(id string, cfg *cri.PodSandboxConfig) (string, error) {
	if e.defaults.SELinux == nil {
		return "", nil
	}
	if level := cfg.GetLinux().GetSecurityContext().GetSelinuxOptions().GetLevel(); level != "" {
		e.levels.Note(id, level)
		return level, nil
	}
	return e.levels.Allot(id)
}

// fileContext is the SELinux context of the pod's files; empty: they need none.
func (s *Sandbox) fileContext() (string, error) { return s.fileContextOf(nil) }

// fileContextOf is that of a container's files. One that the policy does not have is
// fault.Invalid.
func (s *Sandbox) fileContextOf(c *cri.ContainerConfig) (string, error) {
	label, err := s.engine.defaults.SELinux.FileContext(s.plan.SELinuxLevel, s.plan.Config.M, c)
	if err == nil && label != "" && errors.Is(selinux.Accepted(label), selinux.ErrRefused) {
		err = fmt.Errorf("selinux_options: context %s: %w: %w", label, selinux.ErrRefused, fault.Invalid)
	}
	return label, err
}

// relabel gives the volumes that ask for it the container's label.
func (c *Container) relabel(ctx context.Context) error {
	cfg, pod := c.plan.Config.M, c.sandbox.plan.Config.M
	paths := spec.Relabels(cfg)
	if len(paths) == 0 || !c.engine.defaults.SELinux.Confines(pod, cfg) {
		return nil
	}
	return trace.Do(ctx, "relabel volumes", func(ctx context.Context) error {
		return c.engine.paths.Relabel(ctx, c.plan.MountLabel, paths)
	})
}

// pauseProgram is the program of infra containers: a copy with a label that containers
// may execute, where the label of the installed one may not be.
func (e *Engine) pauseProgram() string {
	if e.defaults.SELinux == nil {
		return e.cfg.PauseProgram
	}
	return filepath.Join(e.cfg.StateDir, "pause")
}

// copyPause makes that copy. Containers that run an earlier one keep it.
func (e *Engine) copyPause() (err error) {
	if e.defaults.SELinux == nil {
		return nil
	}
	partial := e.pauseProgram() + ".partial"
	defer func() {
		if err != nil {
			err = errors.Join(err, removeIfThere(partial))
		}
	}()
	if err := copyProgram(partial, e.cfg.PauseProgram); err != nil {
		return err
	}
	if err := setLabel(partial, e.defaults.SELinux.ReadOnly); err != nil {
		return err
	}
	return os.Rename(partial, e.pauseProgram())
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

// setLabel gives a file its SELinux context, an empty one leaves it as it is.
func setLabel(path, label string) error {
	if label == "" {
		return nil
	}
	if err := unix.Lsetxattr(path, "security.selinux", append([]byte(label), 0), 0); err != nil {
		return &os.PathError{Op: "set SELinux context " + label + " of", Path: path, Err: err}
	}
	return nil
}

func removeIfThere(path string) error {
	if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
