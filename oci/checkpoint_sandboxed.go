package oci

import (
	"context"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/criu"
)

// gVisor has verbs of its own for checkpoints, which write its whole sandbox: the kernel in it, and the memory and
// the writable layers of all containers. It pauses meanwhile and resumes by itself, also if the disk is full or the
// verb is killed.

// resumes is a flag of runsc's checkpoint that those have which resume the sandbox. Older ones end it, and restore it.
const resumes = "-save-restore-exec-argv"

// MayCheckpoint is for gVisor alone.
func (t *sandboxedTask) MayCheckpoint(ctx context.Context) error {
	r := t.runtime
	a, err := r.Probe(ctx)
	if err != nil {
		return err
	}
	if !a.quirks.saves {
		return criu.Refuse("the containers of handler " + r.name + " share a runtime sandbox")
	}
	if err := r.node.Load().criu.Enabled(); err != nil {
		return err
	}
	help, err := output(ctx, a.Path, "help", "checkpoint")
	if err != nil || !strings.Contains(string(help), resumes) {
		return criu.Refuse(fmt.Sprintf("handler %s has %s, which cannot resume a container after its checkpoint as gVisor of 2026 can", r.name, a.Version))
	}
	return nil
}

func (t *sandboxedTask) DumpsSandbox() bool { return true }

// Hold does nothing: the kernel in the sandbox starts and kills commands, and is paused meanwhile.
func (t *sandboxedTask) Hold(context.Context) (func(), error) { return func() {}, nil }

// Pause does nothing: the processes are in the cgroup of the sandbox, which must run to write its images.
func (t *sandboxedTask) Pause(context.Context) error { return nil }

// Dump has the runtime write its sandbox.
func (t *sandboxedTask) Dump(ctx context.Context, d Dump) error {
	a, err := t.runtime.Probe(ctx)
	if err == nil {
		err = t.MayCheckpoint(ctx)
	}
	if err != nil {
		return err
	}
	argv := t.runtime.argv(a, "checkpoint", "--image-path", d.Images, "--leave-running", t.ref.ID)
	run := gentle{group: d.Cgroup, argv: argv, env: mountItselfIn(t.ref.Dir)}
	said, err := run.run(ctx)
	switch cause := context.Cause(ctx); {
	case err == nil:
		return checkImages(t.runtime.name, d.Images, "checkpoint.img")
	case cause != nil:
		return fmt.Errorf("%s checkpoint: %w", t.runtime.name, cause)
	case strings.Contains(said, unix.ENOSPC.Error()):
		return fmt.Errorf("%s checkpoint: %w: %w: %w", t.runtime.name, err, unix.ENOSPC, fault.Exhausted)
	}
	const most = 300 // bytes: behind them are a stack trace and more
	said, _, _ = strings.Cut(strings.TrimSpace(said), "\n")
	return fmt.Errorf("%s checkpoint: %w", t.runtime.name, describe(err, strings.ToValidUTF8(said[:min(len(said), most)], "?")))
}
