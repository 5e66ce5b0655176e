package conmon_test

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Not parallel: it measures.
func TestIdleMonitorCost(t *testing.T) {
	const monitors = 20
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
	time.Sleep(1500 * time.Millisecond) // the buffers are given back after a second of silence
	const usual = 490
	private := atMost(t, "KiB of private memory in an idle monitor", usual+20, func() int {
		return sum(func(pid int) int { return rollup(t, pid, "Anonymous:") }) / monitors
	})
	const seconds = 5
	wakeups := atMost(t, fmt.Sprintf("wake-ups in %d seconds of %d idle monitors", seconds, monitors), monitors, func() int {
		before := sum(func(pid int) int { return switches(t, pid) })
		time.Sleep(seconds * time.Second)
		return sum(func(pid int) int { return switches(t, pid) }) - before
	})
	t.Logf("per monitor: Pss %d KiB, private dirty %d KiB, %.1f threads; %.2f wake-ups a second",
		sum(func(pid int) int { return rollup(t, pid, "Pss:") })/monitors, private,
		float64(sum(func(pid int) int { return len(tasks(t, pid)) }))/monitors, float64(wakeups)/monitors/seconds)
}

// atMost measures again until there are no more than most: what comes to rest does
// so later on a machine that is busy. It returns the last measure.
func atMost(t *testing.T, what string, most int, measure func() int) (n int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if n = measure(); n <= most {
			return n
		}
		if time.Now().After(deadline) {
			t.Errorf("%d %s, want %d at most", n, what, most)
			return n
		}
	}
}

// cri-o#6403: what grows with every request will be large one day.
func TestRequestsCostNothing(t *testing.T) {
	c := newContainer(t, "crun", "sleep")
	client := c.run()
	const requests = 30_000
	ctx := limit(t, 10*time.Minute)
	reopen := func(n int) {
		for range n {
			if err := client.ReopenLog(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	reopen(100)
	monitor := c.processes().Monitor.PID
	before := rollup(t, monitor, "Anonymous:")
	reopen(requests)
	// It has its buffers for a second more, and may have been without them before.
	after := atMost(t, fmt.Sprintf("KiB of private memory after %d rotations", requests), before+64, func() int { return rollup(t, monitor, "Anonymous:") })
	t.Logf("%d KiB, after %d rotations %d KiB", before, requests, after)
}

// A container that has written a lot, and then falls silent, leaves its monitor
// no larger than it was.
func TestMemoryIsGivenBack(t *testing.T) {
	c := newContainer(t, "crun", "burst", "50000000")
	c.Stdin = true
	client := c.run()
	monitor := c.processes().Monitor.PID
	time.Sleep(1500 * time.Millisecond)
	before := rollup(t, monitor, "Anonymous:")
	if err := client.CloseStdin(limit(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	var during int
	eventually(t, "the burst", func() bool {
		during = max(during, rollup(t, monitor, "Anonymous:"))
		return size(t, c.LogFile) > 50_000_000
	})
	// What it has while it writes says nothing: it may have fallen silent by then.
	time.Sleep(1500 * time.Millisecond)
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

func tasks(t *testing.T, pid int) []os.DirEntry {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	return entries
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
