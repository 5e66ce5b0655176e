package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

// Exit codes that shells give for a command that they cannot run.
const (
	codeNotExecutable = 126
	codeNotFound      = 127
)

// execFailed classifies the failure of a runtime to start process p: a ProgramError
// if the runtime blames its program, fault.Precondition if the container is ending.
// said is what the runtime has said about it, err the error with that in it.
func (t *watched) execFailed(ctx context.Context, p *specs.Process, said string, err error) error {
	switch {
	case ctx.Err() != nil:
		return err
	case blamesProgram(said, p):
		return &ProgramError{err.Error()}
	case t.ending(ctx):
		return fmt.Errorf("the container ended before the command ran (%s): %w", err.Error(), fault.Precondition)
	}
	return err
}

// result is what becomes of an ExecSync whose program cannot be run: the exit code and
// the message that a shell would give. A kubelet ignores the result of a probe if
// ExecSync returns an error, so that a liveness probe without its program would never
// restart the container (kubernetes#106682).
func (e *ProgramError) result() *ExecResult {
	code := int32(codeNotExecutable)
	if e.notFound() {
		code = codeNotFound
	}
	return &ExecResult{Stderr: []byte(e.Message + "\n"), ExitCode: code}
}

// endTime is how long the end of a container is waited for when a command cannot be
// started in it.
const endTime = time.Second

// ending reports whether the container is about to end: then errors of the runtime
// are about namespaces and cgroups that are being taken down. A second is long for
// the monitor to report the exit, but the kernel may take longer over large processes.
func (t *watched) ending(ctx context.Context) bool {
	select {
	case <-t.Exited():
		return true
	case <-ctx.Done():
	case <-time.After(endTime):
	}
	return t.ref.Sandbox == "" && exiting(t.PID())
}

// exiting reports whether a process is in the kernel's do_exit, or gone.
func exiting(pid int) bool {
	const flagExiting = 4 // PF_EXITING of linux/sched.h
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return errors.Is(err, os.ErrNotExist)
	}
	flags, ok := wire.StatField(stat, 9)
	return ok && flags&flagExiting != 0
}
