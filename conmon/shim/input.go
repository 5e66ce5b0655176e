package shim

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/backoff"
	"github.com/crius-run/crius/internal/poll"
)

// AwaitInput waits until the shim may be told of the end of a process's input:
// until it has read all of it from the pipe stdin, because some shims drop the
// rest. Kata's shim in Go ends the output together with the input, after the
// read that is under way; so with a virtual machine AwaitInput also waits until
// the process has written nothing for a while to the pipes outputs, and the
// answer to the input is not lost. It reports false if ctx ends first.
func (r Record) AwaitInput(ctx context.Context, stdin string, outputs ...string) bool {
	const longest = time.Second
	for pauses := backoff.New(2*time.Millisecond, longest); Unread(stdin) > 0; {
		if !pauses.Pause(ctx) {
			return false
		}
	}
	if r.Sandboxed && !OfRunsc(r.Program) {
		awaitQuiet(ctx, outputs)
	}
	return ctx.Err() == nil
}

const (
	// quietTime is how long a process that answers its input is silent at most: a
	// few round trips to the guest, on a node that is so busy that each of several
	// processes on the way has to wait for a processor. All looks in this time must find
	// silence, so time in which this process did not run itself does not count.
	quietTime  = 2 * time.Second
	quietLooks = 10
	// longestAnswer is for processes that write all the time, whatever they read.
	longestAnswer = 10 * time.Second
)

// awaitQuiet waits until nothing has been written to pipes for quietTime, and
// nothing is left in them; at most longestAnswer.
func awaitQuiet(ctx context.Context, pipes []string) {
	ctx, cancel := context.WithTimeout(ctx, longestAnswer)
	defer cancel()
	last := written(pipes)
	for quiet := 0; quiet < quietLooks && poll.Pause(ctx, quietTime/quietLooks); quiet++ {
		now := written(pipes)
		if !slices.Equal(now, last) || slices.ContainsFunc(pipes, func(pipe string) bool { return Unread(pipe) > 0 }) {
			last, quiet = now, -1
		}
	}
}

// written returns for each pipe when it was last written to.
func written(pipes []string) []unix.Timespec {
	times := make([]unix.Timespec, len(pipes))
	for i, pipe := range pipes {
		var st unix.Stat_t
		_ = unix.Stat(pipe, &st) // one that is gone stays as it is
		times[i] = st.Mtim
	}
	return times
}

// OfRunsc recognizes gVisor's shim by its path, or by the first line of what it
// prints with -v, which begins with the name under which it was called.
func OfRunsc(line string) bool {
	return strings.HasPrefix(filepath.Base(line), "containerd-shim-runsc-v")
}
