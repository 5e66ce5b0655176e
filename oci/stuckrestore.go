package oci

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/poll"
)

// If a thread of a restored process fails in criu's last stage, criu hangs: the thread has stopped with a signal, of
// which its tracer has to be told, and its tracer is criu, which waits for a futex that this thread was to set. Only a
// kill ends that.

const (
	stuckPeriod = 500 * time.Millisecond
	stuckLooks  = 10 // in a row that find the same thread
)

// endIfStuck returns a context that ends when criu hangs while it restores into a cgroup.
func endIfStuck(ctx context.Context, group string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	watch := stuckWatch{find: func() int {
		pids, _ := cgroup.Procs(group) // none before the runtime has made it
		return stuckThread(pids)
	}}
	go func() {
		if poll.Until(ctx, stuckPeriod, watch.isSure) {
			cancel(fmt.Errorf("criu hangs: it waits for thread %d, which has failed", watch.thread))
		}
	}()
	return ctx, func() { cancel(nil) }
}

// stuckWatch tells a thread that criu will never continue from one that has stopped for a moment.
type stuckWatch struct {
	find   func() (thread int)
	thread int
	looks  int
}

func (w *stuckWatch) isSure() bool {
	thread := w.find()
	if thread != w.thread {
		w.thread, w.looks = thread, 0
	}
	w.looks++
	return thread != 0 && w.looks == stuckLooks
}

// stuckThread returns a thread of the processes that has stopped and whose tracer waits for a futex; 0: there is none.
func stuckThread(pids []int) int {
	for _, pid := range pids {
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				continue // it has ended
			}
			status := parseStatus(string(text))
			if !strings.HasPrefix(status["State"], "t") {
				continue
			}
			where, err := os.ReadFile("/proc/" + status["TracerPid"] + "/wchan")
			if err == nil && strings.Contains(string(where), "futex") {
				thread, _ := strconv.Atoi(status["Pid"])
				return thread
			}
		}
	}
	return 0
}
