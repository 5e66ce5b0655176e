package oci

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
)

// gone is a container that nobody watches any more: it died with an earlier
// boot of the machine, or its monitor is lost and it may still be alive.
type gone struct {
	exit    conmon.Exit
	err     error
	process conmon.Process // zero: nothing can be alive
	cgroup  string
	// kill is the runtime's, where the process is that of a sandbox with other
	// containers in it.
	kill func(context.Context) error
}

// Dead is the Task of a container whose exit is known and of which nothing is
// left to ask.
func Dead(exit conmon.Exit) Task { return gone{exit: exit} }

// lost is the Task of a container whose monitor is dead.
func (r *cli) lost(ref Ref, cause error) Task {
	// Without that file the container never came to be.
	processes, _ := conmon.ReadProcesses(ref.Dir)
	g := gone{err: cause, process: processes.Container, cgroup: ref.Cgroup}
	if ref.Sandbox != "" {
		g.kill = func(ctx context.Context) error { return r.forget(ctx, ref) }
	}
	return g
}

var errGone = fmt.Errorf("nobody watches over the container any more: %w", fault.Precondition)

func (g gone) PID() int {
	if conmon.Alive(g.process) {
		return g.process.PID
	}
	return 0
}

func (g gone) Signal(_ context.Context, sig unix.Signal) error {
	if g.kill != nil {
		return errGone
	}
	return conmon.Signal(g.process, sig)
}

func (g gone) Kill(ctx context.Context) error {
	if g.process == (conmon.Process{}) {
		return nil
	}
	if g.kill != nil {
		return g.kill(ctx)
	}
	return errors.Join(conmon.Signal(g.process, unix.SIGKILL), emptyCgroup(ctx, g.cgroup))
}

func (g gone) Exit() (conmon.Exit, error)  { return g.exit, g.err }
func (gone) Close()                        {}
func (gone) Logged(context.Context) uint64 { return 0 }

func (gone) Exited() <-chan struct{} {
	closed := make(chan struct{})
	close(closed)
	return closed
}

func (gone) Start(context.Context) error           { return errGone }
func (gone) Started(context.Context) (bool, error) { return false, errGone }
func (gone) Update(context.Context, Update) error  { return errGone }
func (gone) ReopenLog(context.Context) error       { return errGone }
func (gone) Usage(context.Context) (cgroup.Usage, error) {
	return cgroup.Usage{}, errGone
}
func (gone) Forward(context.Context, uint16) (Stream, error) { return nil, errGone }
func (gone) Exec(context.Context, []string, time.Duration) (*ExecResult, error) {
	return nil, errGone
}
func (gone) Open(context.Context, Command) (*Session, error)          { return nil, errGone }
func (gone) Attach(context.Context, conmon.Streams) (*Session, error) { return nil, errGone }
