package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/limits"
	"github.com/crius-run/crius/oci/stdio"
)

// gone is a container without a reachable monitor: it died with an earlier boot
// of the machine, or its monitor is lost and it may still be alive.
type gone struct {
	exit    conmon.Exit
	err     error
	process conmon.Process // zero: nothing can be alive
	ref     Ref
	// kill is the runtime's kill, for a process that is a runtime sandbox with other
	// containers in it.
	kill func(context.Context) error
	// unreachable: its monitor may be alive and did not answer.
	unreachable bool
	why         error // why only signals reach it; nil: see unreachable
}

// Dead returns the Task of a container whose exit is known and that has nothing
// left to ask.
func Dead(exit conmon.Exit) Task { return &gone{exit: exit} }

// lost returns the Task of a container whose monitor is dead.
func lost(ref Ref, cause error) *gone {
	// Without that file the container was never created.
	processes, _ := conmon.ReadProcesses(ref.Dir)
	return &gone{err: cause, process: processes.Container, ref: ref}
}

func (r *cli) lost(ref Ref, cause error) *gone {
	g := lost(ref, cause)
	if ref.Holder != "" {
		g.kill = func(ctx context.Context) error { return r.forget(ctx, ref) }
	}
	return g
}

// unreachable uses what the monitor has written to disk.
func unreachable(d driver, ref Ref) Task {
	g := d.lost(ref, errUnreachable)
	g.unreachable = true
	return g
}

func (r *cli) Unreachable(ref Ref) Task { return unreachable(r, ref) }

var (
	errGone        = fmt.Errorf("the container's monitor is gone: %w", fault.Precondition)
	errUnreachable = fmt.Errorf("the container's monitor has not answered since the server started; see crius check: %w", fault.Unavailable)
)

// refusal returns why only signals reach the container.
func (g *gone) refusal() error {
	switch {
	case g.why != nil:
		return g.why
	case g.unreachable:
		return errUnreachable
	}
	return errGone
}

func (g *gone) PID() int {
	if conmon.Alive(g.process) {
		return g.process.PID
	}
	return 0
}

func (g *gone) PIDNamespace() (*os.File, error) { return nil, g.refusal() }

func (g *gone) Signal(_ context.Context, sig unix.Signal) error {
	if g.kill != nil {
		return g.refusal()
	}
	return conmon.Signal(g.process, sig)
}

func (g *gone) Kill(ctx context.Context) error {
	if g.process == (conmon.Process{}) {
		return nil
	}
	if g.kill != nil {
		return g.kill(ctx)
	}
	return errors.Join(conmon.Signal(g.process, unix.SIGKILL), emptyCgroup(ctx, g.ref))
}

func (g *gone) Exit() (conmon.Exit, error)           { return g.exit, g.err }
func (*gone) Close()                                 {}
func (*gone) Logged(context.Context) conmon.LogCount { return conmon.LogCount{} }

func (*gone) LogTrouble() (conmon.LogTrouble, <-chan struct{}) { return conmon.LogTrouble{}, nil }

// EndAbandoned does nothing: the commands end when the container is killed.
func (*gone) EndAbandoned(context.Context) func(context.Context) error { return nil }

func (g *gone) Exited() <-chan struct{} {
	if g.unreachable {
		return nil
	}
	closed := make(chan struct{})
	close(closed)
	return closed
}

func (g *gone) Start(context.Context) error                 { return g.refusal() }
func (g *gone) Started(context.Context) (bool, error)       { return false, g.refusal() }
func (g *gone) Update(context.Context, limits.Update) error { return g.refusal() }
func (g *gone) ReopenLog(context.Context) error             { return g.refusal() }
func (g *gone) Usage(context.Context) (cgroup.Usage, error) {
	return cgroup.Usage{}, g.refusal()
}
func (g *gone) Forward(context.Context, uint16) (Stream, error) { return nil, g.refusal() }
func (g *gone) Exec(context.Context, []string, time.Duration) (*ExecResult, error) {
	return nil, g.refusal()
}
func (g *gone) Open(context.Context, Command) (*stdio.Session, error) { return nil, g.refusal() }
func (g *gone) Attach(context.Context, conmon.Streams) (*stdio.Session, error) {
	return nil, g.refusal()
}

func (g *gone) MayCheckpoint(context.Context) error  { return g.refusal() }
func (g *gone) DumpsSandbox() bool                   { return false }
func (g *gone) Hold(context.Context) (func(), error) { return nil, g.refusal() }
func (g *gone) Pause(context.Context) error          { return g.refusal() }
func (g *gone) Dump(context.Context, Dump) error     { return g.refusal() }
func (g *gone) EndDump(ctx context.Context, group string) error {
	return endDump(ctx, group, g.ref.Cgroup)
}

// unstartable is a container that the runtime has refused to create.
type unstartable struct {
	gone
	code int32
	end  sync.Once
	over chan struct{} // closed once there is an exit
}

// Unstartable returns the Task of a container that the runtime could not create
// and no longer knows. Start, and everything else that needs a process, fails
// with cause, a ProgramError. Kill ends it with code.
func Unstartable(cause error, code int32) Task {
	return &unstartable{gone: gone{why: cause}, code: code, over: make(chan struct{})}
}

// NeverStarted reports whether a Task is Unstartable: it has no monitor that
// would have recorded its exit.
func NeverStarted(t Task) bool {
	_, is := t.(*unstartable)
	return is
}

func (u *unstartable) Kill(context.Context) error {
	u.end.Do(func() {
		u.exit = conmon.Exit{Code: u.code, FinishedAt: time.Now()}
		close(u.over)
	})
	return nil
}

func (u *unstartable) Exited() <-chan struct{} { return u.over }
