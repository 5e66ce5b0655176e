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
	"github.com/crius-run/crius/internal/backoff"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/poll"
)

// killed is the exit status of what has gone without a word.
const killed = 128 + int(unix.SIGKILL)

// cleanUpTime bounds what a shim's program does about a shim that is dead.
const cleanUpTime = 20 * time.Second

// wait prints how the container has ended, once it has. It ends what is left of a
// container whose shim has died. As long as it runs it takes the events of the
// shim, and looks after its log, if the shim was started for this container.
//
// With withStdin standard input is a pipe: at its end that of the container's own
// has come, and the shim is told.
func wait(ctx context.Context, p shim.Program, withStdin bool) error {
	r, err := shim.ReadRecord(p.Dir)
	if err != nil {
		return err
	}
	if r.Leader && r.Sandboxed {
		stop, err := serveEvents(ctx, p.Dir)
		if err != nil {
			fmt.Fprintln(os.Stderr, "cannot receive events from the shim, OOM kills will not be reported:", err) // OOM among them
		} else {
			defer stop()
		}
	}
	if r.Leader {
		go trimLog(ctx, filepath.Join(p.Dir, shim.LogFile))
	}
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

// waitFor asks again where only the connection has ended.
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
		case err == nil:
			return status, nil
		case errors.Is(err, fault.NotFound):
			return killed, nil // deleted by somebody, and so dead
		case !errors.Is(err, shim.ErrGone):
			return 0, err
		}
	}
}

// cleanUp kills what a dead shim has left of the container.
func cleanUp(ctx context.Context, r shim.Record, p shim.Program) int {
	ctx, cancel := context.WithTimeoutCause(ctx, cleanUpTime, fault.Timeout)
	defer cancel()
	status, err := p.Delete(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, err) // the server does it once more when the container is deleted
		killLeft(ctx, r, p.Dir)
	}
	if err != nil || status == 0 {
		return killed
	}
	return status
}

// dieTime is far more than a process needs that has been killed.
const dieTime = 5 * time.Second

// killLeft kills what lives of a container that is about to be said to have
// ended. Those in a sandbox end with it: it works for the one that was first.
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
		if known, err := conmon.ReadProcesses(dir); err == nil { // else the container has not come to be
			all = append(all, known.Container)
		}
	case r.Leader:
		all = shim.Workers(dir)
	}
	return slices.DeleteFunc(all, func(process wire.Process) bool { return process.PID == os.Getpid() || !conmon.Alive(process) })
}

// closeStdin tells the shim of the end of the container's input, when the shim has
// taken all of it: some throw away what they have not read.
func closeStdin(ctx context.Context, r shim.Record, p shim.Program) {
	const longest = time.Second
	_, _ = io.Copy(io.Discard, os.Stdin)
	for pauses := backoff.New(2*time.Millisecond, longest); shim.Unread(filepath.Join(p.Dir, wire.StdinFifo)) > 0; {
		if !pauses.Pause(ctx) {
			return
		}
	}
	client, err := r.Dial(ctx)
	if err != nil {
		return
	}
	defer client.Close()
	_ = client.CloseStdin(ctx, shim.Process{ID: p.ID}) // one that has ended has no use for it
}

// trimLog keeps the shim's log from filling the file system. The shim goes on
// where it was, and what was before takes no room.
func trimLog(ctx context.Context, file string) {
	const period, most = time.Minute, 1 << 20
	for poll.Pause(ctx, period) {
		var st unix.Stat_t
		if unix.Stat(file, &st) == nil && st.Blocks*512 > most {
			_ = os.Truncate(file, 0)
		}
	}
}
