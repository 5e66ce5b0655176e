//go:build budgets

package conmon_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/test/kit/wait"
)

// An idle monitor has hardly more private memory than a Go program that only
// sleeps, and sleeps as well.
func TestBudgetIdleMonitor(t *testing.T) {
	const monitors = 20
	yardstick := idle(t)
	var pids []int
	for range monitors {
		c := newContainer(t, "crun", "sleep")
		c.run()
		pids = append(pids, c.processes().Monitor.PID)
	}
	sum := func(of func(pid int) int) (n int) {
		for _, pid := range pids {
			n += of(pid)
		}
		return n
	}
	time.Sleep(silence)
	least := rollup(t, yardstick, "Anonymous:")
	private := atMost(t, "KiB of private memory in an idle monitor", least*115/100, func() int {
		return sum(func(pid int) int { return rollup(t, pid, "Anonymous:") }) / monitors
	})
	const seconds = 5
	wakeups := atMost(t, fmt.Sprintf("wake-ups in %d seconds of %d idle monitors", seconds, monitors), monitors, func() int {
		before := sum(func(pid int) int { return switches(t, pid) })
		time.Sleep(seconds * time.Second)
		return sum(func(pid int) int { return switches(t, pid) }) - before
	})
	t.Logf("per monitor: Pss %d KiB, private dirty %d KiB, %d%% of the yardstick's, %.1f threads; %.2f wake-ups a second",
		sum(func(pid int) int { return rollup(t, pid, "Pss:") })/monitors, private, 100*private/least,
		float64(sum(func(pid int) int { return len(tasks(t, pid)) }))/monitors, float64(wakeups)/monitors/seconds)
}

// silence is how long a monitor must be idle before it has given its buffers
// back.
const silence = 1500 * time.Millisecond

// idle runs the reference program in a monitor's environment.
func idle(t *testing.T) (pid int) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "idle")
	build(path, "./testdata/idle")
	cmd := exec.Command(path)
	environ := wire.Environ()
	cmd.Env = environ[:]
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return cmd.Process.Pid
}

// atMost measures until the result is at most most, because a process comes to
// rest later on a busy machine. It returns the last result.
func atMost(t *testing.T, what string, most int, measure func() int) (n int) {
	t.Helper()
	if !wait.Until(t.Context(), func() bool { n = measure(); return n <= most }) {
		t.Errorf("%d %s, want %d at most", n, what, most)
	}
	return n
}

// rests checks that a process is not scheduled for a while.
func rests(t *testing.T, pid int) {
	t.Helper()
	atMost(t, "wake-ups of an idle monitor", 0, func() int {
		before := switches(t, pid)
		time.Sleep(silence)
		return switches(t, pid) - before
	})
}

func TestBudgetHeldBackLine(t *testing.T) {
	c := newContainer(t, "crun", "prompt")
	c.Stdin = true
	client := c.launch()
	a := c.attach(conmon.Streams{Stdout: true})
	c.start()
	expect(t, a.Stdout, "password: ")
	rests(t, c.processes().Monitor.PID)
	if err := client.CloseStdin(limit(t)); err != nil {
		t.Fatal(err)
	}
	exit(t, client)
}

func TestBudgetTerminalLetGo(t *testing.T) {
	c := newContainer(t, "crun", "letgo")
	c.Terminal = true
	c.awaitHangUp(c.run())
	rests(t, c.processes().Monitor.PID)
}

// cri-o#6403: memory that grows with every request will be large one day.
func TestBudgetRequests(t *testing.T) {
	c := newContainer(t, "crun", "sleep")
	client := c.run()
	const requests = 30_000
	reopen := func(n int) {
		for range n {
			if err := client.ReopenLog(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	reopen(100)
	monitor := c.processes().Monitor.PID
	before := rollup(t, monitor, "Anonymous:")
	reopen(requests)
	// It keeps its buffers for a second more, and may have been without them
	// before.
	after := atMost(t, fmt.Sprintf("KiB of private memory after %d rotations", requests), before+64, func() int { return rollup(t, monitor, "Anonymous:") })
	t.Logf("%d KiB, after %d rotations %d KiB", before, requests, after)
}

// A container that has written a lot, and then falls silent, leaves its monitor
// no larger than it was.
func TestBudgetBurst(t *testing.T) {
	c := newContainer(t, "crun", "burst", "50000000")
	c.Stdin = true
	client := c.run()
	monitor := c.processes().Monitor.PID
	time.Sleep(silence)
	before := rollup(t, monitor, "Anonymous:")
	if err := client.CloseStdin(limit(t)); err != nil {
		t.Fatal(err)
	}
	var during int
	wait.For(t, "the burst", func() bool {
		during = max(during, rollup(t, monitor, "Anonymous:"))
		return size(t, c.LogFile) > 50_000_000
	})
	// Its memory while it writes says nothing: it may have fallen silent by then.
	time.Sleep(silence)
	after := atMost(t, "KiB of private memory after a burst", before+32, func() int { return rollup(t, monitor, "Anonymous:") })
	t.Logf("%d KiB, while it wrote %d, afterwards %d", before, during, after)
}

func rollup(t *testing.T, pid int, field string) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := bytes.Cut(text, []byte("\n"+field))
	kib, err := strconv.Atoi(strings.Fields(string(rest))[0])
	if err != nil {
		t.Fatal(err)
	}
	return kib
}

// switches counts how often the threads of a process have been scheduled.
func switches(t *testing.T, pid int) (n int) {
	t.Helper()
	for _, task := range tasks(t, pid) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", pid, task.Name()))
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:")
		count, err := strconv.Atoi(strings.Fields(rest)[0])
		if err != nil {
			t.Fatal(err)
		}
		n += count
	}
	return n
}
