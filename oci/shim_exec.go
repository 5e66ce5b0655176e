package oci

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/proc"
	"github.com/crius-run/crius/oci/stdio"
	"github.com/crius-run/crius/oci/tuning"
)

func (t *shimTask) Exec(ctx context.Context, args []string, timeout time.Duration) (*ExecResult, error) {
	return execSync(ctx, t, t.runtime.output, args, timeout)
}

func (t *shimTask) Open(ctx context.Context, c Command) (*stdio.Session, error) {
	e, err := t.exec(ctx, c)
	if err != nil {
		return nil, err
	}
	return e.Session, nil
}

// shimExec is a command that a shim runs, with the server's resources for it.
type shimExec struct {
	task    *shimTask
	process shim.Process
	dir     string // with its FIFOs
	fifos   [3]*shim.Fifo
	client  *shim.Client // to wait for its end

	ended  chan struct{} // closed when the command has ended, or the shim has died
	status unix.WaitStatus
	err    error // why there is no status
}

// exec starts a command. A shim starts it even if its caller has stopped
// waiting.
func (t *shimTask) exec(ctx context.Context, c Command) (*execution, error) {
	return beginWhole(ctx, func(ctx context.Context) (*execution, error) { return t.begin(ctx, c) },
		func(e *execution) { t.killExec(context.WithoutCancel(ctx), e) })
}

// begin has the shim run a command, with FIFOs of the server as its stdio.
func (t *shimTask) begin(ctx context.Context, c Command) (_ *execution, err error) {
	if err := t.paused(ctx); err != nil {
		return nil, err
	}
	process, err := commandProcess(t.ref, c, func() tuning.Set { return nil }) // the shim runs the runtime, on CPUs unknown to the server
	if err != nil {
		return nil, err
	}
	text, free, err := t.ref.encodeProcess(process)
	if err != nil {
		return nil, err
	}
	defer free()
	x := &shimExec{task: t, process: shim.Process{ID: t.ref.ID}}
	if x.client, err = t.record.Reach(ctx); err != nil {
		return nil, fmt.Errorf("%s exec: %w", t.runtime.name, err)
	}
	io, err := x.open(c)
	if err != nil {
		x.close()
		return nil, fmt.Errorf("%s exec: %w", t.runtime.name, err)
	}
	var pid int
	err = trace.Do(ctx, "runtime exec", func(ctx context.Context) error {
		if err := x.client.Exec(ctx, x.process, text, io); err != nil {
			return err
		}
		if pid, err = x.client.Start(ctx, x.process); err == nil && !t.record.Sandboxed {
			err = shim.CheckPID(pid)
		}
		return err
	})
	if err != nil {
		// A shim that has not answered until now may not answer soon, and the
		// caller no longer waits for it.
		if ctx.Err() != nil {
			go x.abandon(ctx)
		} else {
			x.abandon(ctx)
		}
		return nil, t.execFailed(ctx, process, err.Error(), fmt.Errorf("%s exec (to run %.200q): %w", t.runtime.name, c.Args[0], err))
	}
	e := x.session(ctx, c, pid)
	if closed(t.client.Exited()) {
		t.killExec(ctx, e) // as in cliTask.begin
	}
	return e, nil
}

// open makes the FIFOs, in a directory whose name identifies the command.
func (x *shimExec) open(c Command) (io shim.Stdio, err error) {
	prefix := sessionDirs
	if c.noted {
		prefix = execDirs
	}
	if x.dir, err = os.MkdirTemp(x.task.ref.Dir, prefix); err != nil {
		return io, err
	}
	x.process.Exec = execIDOf(x.dir)
	io.Terminal = c.Terminal
	for i, one := range []struct {
		name   string
		wanted bool
		path   *string
	}{{"in", c.Stdin || x.emptyInput(c), &io.Stdin}, {"out", true, &io.Stdout}, {"err", !c.Terminal, &io.Stderr}} {
		if !one.wanted {
			continue
		}
		if x.fifos[i], err = shim.NewFifo(filepath.Join(x.dir, one.name)); err != nil {
			return io, err
		}
		*one.path = x.fifos[i].Path
	}
	return io, nil
}

// emptyInput reports whether the command gets an input that ends at once.
// Without any input, runc's shim gives it the node's /dev/null, whose owner and
// mode root in a container could change.
func (x *shimExec) emptyInput(c Command) bool {
	return !c.Stdin && !c.Terminal && !x.task.record.Sandboxed
}

func (x *shimExec) close() {
	for _, f := range x.fifos {
		f.Close()
	}
	x.client.Close()
	_ = mount.RemoveAll(x.dir) // otherwise it goes with the container
}

// abandon takes back a command that did not start, or that may or may not have
// started. It releases the shimExec, and takes at most twice lastTime.
func (x *shimExec) abandon(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTime)
	defer cancel()
	_ = x.client.Kill(ctx, x.process, unix.SIGKILL, false)
	x.forget(ctx)
}

// forget deletes an ended command in the shim.
func (x *shimExec) forget(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTime)
	defer cancel()
	if err := x.client.Delete(ctx, x.process); err != nil && !errors.Is(err, fault.NotFound) {
		slog.DebugContext(ctx, "shim failed to delete an exec process", "container", x.task.ref.ID, "err", err) // it goes with the container
	}
	x.close()
}

// session hands the command over. Its own goroutine waits for the command's end
// and, once the session is over as well, deletes the command in the shim.
func (x *shimExec) session(ctx context.Context, c Command, pid int) *execution {
	// The shim has opened the write ends of the output FIFOs by now. The server's
	// are closed, because otherwise no reader would see end of file.
	ends := stdio.Ends{Stdout: x.fifos[1].Read, Terminal: c.Terminal}
	_ = x.fifos[1].Write.Close()
	x.wait(ctx)
	if in := x.fifos[0]; in != nil {
		if !x.emptyInput(c) { // a client may write, and end, the input at once
			x.awaitReader(ctx, in)
		}
		ends.Stdin = in.Write
	}
	if words := x.fifos[2]; words != nil {
		ends.Stderr = words.Read
		_ = words.Write.Close()
	}
	if c.Terminal {
		ends.Resize = x.task.resize(x.process)
	}
	var s *stdio.Session
	ends.EndInput = func() { x.closeStdin(ctx, s) }
	s = stdio.New(ends)
	input := make(chan struct{}) // closed when the FIFO of the input may be
	go func() {
		<-x.ended
		s.Finish(x.status, x.err)
		<-s.Closed()
		<-input
		x.forget(ctx)
	}()
	go func() {
		select {
		case <-s.Ended():
		case <-s.Closed():
			x.hangUp(ctx, c.Terminal)
		}
	}()
	if !x.emptyInput(c) {
		close(input)
	} else {
		go func() {
			_ = x.read(context.WithoutCancel(ctx), x.fifos[0]) // a command that has ended needs no input
			close(input)
			s.EndInput()
		}()
	}
	e := &execution{Session: s, Command: proc.Command{PID: pid}, kill: func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTime)
		defer cancel()
		_ = x.client.Kill(ctx, x.process, unix.SIGKILL, false) // true would kill the whole container
	}}
	if !x.task.record.Sandboxed {
		e.NoteLeader()
		x.task.ref.limits().ShareOOMScore(x.task.PID(), pid)
	}
	return e
}

// wait has the end of the command noted.
func (x *shimExec) wait(ctx context.Context) {
	x.ended = make(chan struct{})
	go func() {
		defer close(x.ended)
		status, err := x.client.Wait(context.WithoutCancel(ctx), x.process)
		x.status, x.err = unix.WaitStatus(status<<8), err
	}()
}

// readerTime bounds how long a client waits for the shim to open the input of a command.
var readerTime = verbTimeout

func (x *shimExec) awaitReader(ctx context.Context, in *shim.Fifo) {
	ctx, cancel := context.WithTimeout(ctx, readerTime)
	defer cancel()
	if err := x.read(ctx, in); err != nil && ctx.Err() != nil {
		slog.WarnContext(ctx, "shim does not read the input of an exec process, which may not see its end", "container", x.task.ref.ID, "err", err)
	}
}

// read returns when the shim has opened the input of the command for reading, which it may do after it has answered,
// or has died, or the command has ended.
func (x *shimExec) read(ctx context.Context, in *shim.Fifo) error {
	ctx, cancel := x.whileRunning(ctx)
	defer cancel()
	return in.AwaitReader(ctx)
}

// whileRunning returns a context that ends with the command or the shim as well.
func (x *shimExec) whileRunning(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		select {
		case <-x.ended:
		case <-x.task.client.Exited():
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// hangUp tells a command that its client has left, as a terminal that is closed does elsewhere: the shim keeps it open.
// A command without a terminal is told when it writes something, for which it would get SIGPIPE elsewhere: here it
// would wait for a reader until its container ends, and many programs take SIGPIPE only from a write. hangUp then reads
// what it writes until its end: it may ignore the signal, or say something about it.
func (x *shimExec) hangUp(ctx context.Context, terminal bool) {
	ctx, cancel := x.whileRunning(context.WithoutCancel(ctx))
	defer cancel()
	tell := sync.OnceFunc(func() { x.tellLeft(ctx) })
	if terminal {
		tell()
	}
	var outputs sync.WaitGroup
	for _, fifo := range []string{"out", "err"} {
		outputs.Go(func() { shim.Discard(ctx, filepath.Join(x.dir, fifo), tell) })
	}
	outputs.Wait()
}

// tellLeft sends the signal by which programs know that their client has left.
func (x *shimExec) tellLeft(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lastTime)
	defer cancel()
	if err := x.client.Kill(ctx, x.process, unix.SIGHUP, false); err != nil && ctx.Err() == nil && !errors.Is(err, fault.NotFound) {
		slog.DebugContext(ctx, "cannot tell an exec process that its client has left", "container", x.task.ref.ID, "err", err)
	}
}

// closeStdin reports the end of the input to the shim when that loses nothing.
func (x *shimExec) closeStdin(ctx context.Context, s *stdio.Session) {
	ctx = context.WithoutCancel(ctx)
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		defer stop()
		select {
		case <-s.Ended():
		case <-s.Closed():
		case <-waiting.Done():
		}
	}()
	var outputs []string
	for _, f := range x.fifos[1:] {
		if f != nil {
			outputs = append(outputs, f.Path)
		}
	}
	if !x.task.record.AwaitInput(waiting, x.fifos[0].Path, outputs...) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, lastTime)
	defer cancel()
	_ = x.client.CloseStdin(ctx, x.process) // a command that has ended does not need it
}

// killExec kills a command whose directory is no longer needed. In a runtime sandbox
// the descendants are out of reach: they end with the container.
func (t *shimTask) killExec(ctx context.Context, e *execution) {
	defer e.forget()
	if !t.record.Sandboxed {
		e.Kill(ctx, t.ref.ID, t.ref.Cgroup)
		return
	}
	e.kill()
}
