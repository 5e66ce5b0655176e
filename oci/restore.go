package oci

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/criu"
)

// Restored is a checkpoint from which a container is made. All of it is crius's own copy.
type Restored struct {
	Spec   []byte // the OCI spec of the container that was dumped
	Images string // directory with its images
}

// restoreLog is the log of criu, in the directory of the bundle.
const restoreLog = "restore.log"

func (r *cli) MayRestore(ctx context.Context) error {
	_, _, err := r.restores(ctx)
	return err
}

// restores returns what a restore needs.
func (r *cli) restores(ctx context.Context) (*Abilities, criu.Found, error) {
	a, found, err := r.checkpoints(ctx)
	if err == nil && !a.quirks.holds {
		err = criu.Refuse(fmt.Sprintf("handler %s has %s, which cannot hold a restored container before its start, as runc can", r.name, a.Version))
	}
	if err == nil && strings.ContainsFunc(r.monitor, notInOptions) {
		err = fmt.Errorf("criu cannot run %q, the path of crius-conmon: move it to one of letters, digits and /._+-: %w", r.monitor, fault.Precondition)
	}
	return a, found, err
}

// notInOptions reports whether criu, or the shell by which it runs a program, would take r for something else.
func notInOptions(r rune) bool {
	return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune("/._+-", r))
}

func (r *shimmed) MayRestore(context.Context) error {
	return criu.Refuse("handler " + r.name + " uses a shim")
}

func (r *shimmed) Restore(ctx context.Context, _ Ref, _ *specs.Spec, _ IO, _ Restored) (Task, error) {
	return nil, r.MayRestore(ctx)
}

func (r *cli) Restore(ctx context.Context, ref Ref, spec *specs.Spec, io IO, from Restored) (Task, error) {
	a, found, err := r.restores(ctx)
	if err != nil {
		return nil, err
	}
	if err := compareSpecs(from.Spec, spec); err != nil {
		return nil, err
	}
	if err := found.WriteRestoreOptions(ref.criuOptions(), r.monitor); err != nil {
		return nil, fmt.Errorf("write options of criu: %w", err)
	}
	if err := criu.ReviveVolumes(from.Images); err != nil {
		return nil, err
	}
	if err := conmon.HoldBack(ref.Dir); err != nil {
		return nil, err
	}
	monitor := monitorSpec(ref, spec, io, r.argv(a, r.restoreArgs(a, ref, from)...))
	monitor.Held = true
	monitor.Env = append(append(monitor.Env, found.Environ()...), conmon.HoldEnv(ref.Dir)...)
	restoring, done := endIfStuck(ctx, ref.Cgroup)
	client, err := r.create(restoring, "runtime "+r.name, a, ref, spec, monitor)
	done()
	r.relayLog(ctx, ref.ID, runtimeLog(ref))
	if err != nil {
		return nil, restoreFailed(err, filepath.Join(ref.Dir, restoreLog))
	}
	if err := cmp.Or(checkHeld(client.PID(), ref.Cgroup, spec), checkMasks(client.PID(), spec.Linux), checkMounts(client.PID(), ref.Rootfs(), spec)); err != nil {
		_ = client.Close()
		return nil, err
	}
	return r.task(ctx, ref, client)
}

// restoreFailed adds the cause that criu has logged. The error is no ProgramError: the restore has failed, and
// not only the start of a container that there is.
func restoreFailed(err error, log string) error {
	if program, ok := errors.AsType[*ProgramError](err); ok {
		err = errors.New(program.Message)
	}
	if text, _ := criu.LogError(log); text != "" {
		err = fmt.Errorf("%w: criu: %s", err, text)
	}
	return fmt.Errorf("restore: %w", err)
}

func (r *cli) restoreArgs(a *Abilities, ref Ref, from Restored) []string {
	args := []string{
		"restore", "--detach", "--bundle", ref.Dir, "--pid-file", pidFile(ref),
		"--image-path", from.Images, "--work-path", ref.Dir,
	}
	return r.logged(a, runtimeLog(ref), args)
}

// letGo starts a container that was restored.
func (t *cliTask) letGo(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, verbTimeout,
		fmt.Errorf("criu did not resume the container within %s: %w", verbTimeout, fault.Timeout))
	defer cancel()
	if err := t.client.Start(ctx); err != nil {
		return fmt.Errorf("resume the restored container: %w", describe(err, strings.TrimSpace(string(logTail(runtimeLog(t.ref), 4<<10)))))
	}
	return nil
}
