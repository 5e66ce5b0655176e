package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/poll"
)

// killed is the exit status of a container that ended without reporting one.
const killed = 128 + int(unix.SIGKILL)

// unknown is what gVisor's shim reports of a container that it has lost.
const unknown = 128

// cleanUpTime bounds the clean-up by a shim's program after the shim has died.
const cleanUpTime = 20 * time.Second

// wait waits until the container has ended and prints its exit status. If the shim has
// died, it kills the rest of the container. It trims the runtime's log and, if the shim was started
// for this container, the shim's, and receives its events.
//
// With withStdin, standard input is a pipe whose end means the end of the container's
// input, which wait passes on to the shim.
func wait(ctx context.Context, p shim.Program, withStdin bool) error {
	r, err := shim.ReadRecord(p.Dir)
	if err != nil {
		return err
	}
	if r.Leader && r.Sandboxed {
		stop, err := serveEvents(ctx, p.Dir)
		if err != nil {
			fmt.Fprintln(os.Stderr, "cannot receive events from the shim, OOM kills will not be reported:", err) // including OOM
		} else {
			defer stop()
		}
	}
	logs := []string{filepath.Join(p.Dir, runtimeLog)}
	if r.Leader {
		logs = append(logs, filepath.Join(p.Dir, shim.LogFile))
	}
	go trimLogs(ctx, logs)
	if withStdin {
		go closeStdin(ctx, r, p)
	}
	status, err := waitFor(ctx, r, p)
	if err != nil {
		return err
	}
	oom := ""
	if _, err := os.Lstat(filepath.Join(p.Dir, wire.OOMFile)); err == nil {
		oom = `,"oom":true`
	}
	fmt.Printf("{\"id\":%q,\"exitStatus\":%d%s}\n", p.ID, status, oom)
	return nil
}

// waitFor waits for the container, again if only the connection has ended.
func waitFor(ctx context.Context, r shim.Record, p shim.Program) (int, error) {
	for {
		client, err := r.Dial(ctx)
		switch {
		case errors.Is(err, fault.NotFound):
			return cleanUp(ctx, r, p), nil
		case err != nil:
			return 0, err
		}
		status, err := client.Wait(ctx, shim.Process{ID: p.ID})
		client.Close()
		switch {
		case err == nil && (status == 0 || status == unknown) && r.Sandboxed && diedWithSandbox(ctx, p.Dir):
			return killed, nil
		case err == nil:
			return status, nil
		case errors.Is(err, fault.NotFound):
			return killed, nil // somebody has deleted it, so it is dead
		case !errors.Is(err, shim.ErrGone):
			return 0, err
		}
	}
}

// deadTime is how long a shim may take to notice that its sandbox is dead.
const deadTime = 10 * time.Second

// diedWithSandbox reports whether the sandbox of a container is dead. Of a
// container that ended with its virtual machine Kata 1 says that it succeeded,
// and gVisor's shim that its status is unknown.
// Two things must show that it did not: the sandbox does not answer, and the
// shim says soon that the sandbox has ended. A shim may have no statistics.
func diedWithSandbox(ctx context.Context, dir string) bool {
	id := sandboxOf(dir)
	infra := filepath.Join(dir, "../../pods", id, "infra")
	r, err := shim.ReadRecord(infra)
	if id == "" || infra == dir || err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, deadTime)
	defer cancel()
	client, err := r.Dial(ctx)
	if err != nil {
		return errors.Is(err, fault.NotFound)
	}
	defer client.Close()
	_, err = client.Usage(ctx, id)
	switch {
	case err == nil || ctx.Err() != nil:
		return false
	case errors.Is(err, fault.Unimplemented): // it is no sign of death, and not worth a wait
		state, err := client.State(ctx, shim.Process{ID: id})
		return err == nil && state.Ended
	}
	return poll.Until(ctx, 20*time.Millisecond, func() bool {
		state, err := client.State(ctx, shim.Process{ID: id})
		return err == nil && state.Ended || errors.Is(err, fault.NotFound) || errors.Is(err, shim.ErrGone)
	})
}

// cleanUp kills the rest of a container whose shim is dead.
func cleanUp(ctx context.Context, r shim.Record, p shim.Program) int {
	ctx, cancel := context.WithTimeoutCause(ctx, cleanUpTime, fault.Timeout)
	defer cancel()
	status, err := p.Delete(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, err) // the server does it again when it deletes the container
		killLeft(ctx, r, p.Dir)
	}
	if err != nil || status == 0 {
		return killed
	}
	return status
}

// dieTime is far longer than a killed process needs to end.
const dieTime = 5 * time.Second

// killLeft kills the remaining processes of a container before its end is reported.
// Containers in a runtime sandbox end with it, and the sandbox works in the directory of the first
// one.
func killLeft(ctx context.Context, r shim.Record, dir string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dieTime)
	defer cancel()
	var left []wire.Process
	ended := poll.Until(ctx, 5*time.Millisecond, func() bool {
		left = living(r, dir)
		for _, process := range left {
			if err := conmon.Signal(process, unix.SIGKILL); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}
		return len(left) == 0
	})
	if !ended {
		fmt.Fprintf(os.Stderr, "processes still alive after SIGKILL: %v\n", left)
	}
}

func living(r shim.Record, dir string) []wire.Process {
	var all []wire.Process
	switch {
	case !r.Sandboxed:
		if known, err := conmon.ReadProcesses(dir); err == nil { // otherwise the container was never created
			all = append(all, known.Container)
		}
	case r.Leader:
		all = shim.Workers(dir)
	}
	return slices.DeleteFunc(all, func(process wire.Process) bool { return process.PID == os.Getpid() || !conmon.Alive(process) })
}

// closeStdin passes the end of the container's input on when that loses nothing.
func closeStdin(ctx context.Context, r shim.Record, p shim.Program) {
	_, _ = io.Copy(io.Discard, os.Stdin)
	path := func(name string) string { return filepath.Join(p.Dir, name) }
	if !r.AwaitInput(ctx, path(wire.StdinFifo), path(wire.StdoutFifo), path(wire.StderrFifo)) {
		return
	}
	client, err := r.Dial(ctx)
	if err != nil {
		return
	}
	defer client.Close()
	_ = client.CloseStdin(ctx, shim.Process{ID: p.ID}) // a container that has ended needs no input
}

// runtimeLog is where shims have runtimes put what fails, in the directory of each container.
const runtimeLog = "log.json"

// trimLogs keeps logs, which grow with each command that fails, from filling the node's memory.
func trimLogs(ctx context.Context, files []string) {
	const period = time.Minute
	for poll.Pause(ctx, period) {
		for _, file := range files {
			trimLog(file)
		}
	}
}

// trimLog empties a log that has become large. A writer that continues at its offset leaves a hole
// before that, which takes no room.
func trimLog(file string) {
	const most = 1 << 20
	var st unix.Stat_t
	if unix.Stat(file, &st) == nil && st.Blocks*512 > most {
		_ = os.Truncate(file, 0)
	}
}
