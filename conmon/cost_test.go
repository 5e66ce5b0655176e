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
	time.Sleep(1500 * time.Millisecond) // the buffers are given back after a second of silence
	var pss, private, threads, wakeups int
	for _, pid := range pids {
		pss += rollup(t, pid, "Pss:")
		private += rollup(t, pid, "Anonymous:")
		threads += len(tasks(t, pid))
		wakeups -= switches(t, pid)
	}
	const seconds = 5
	time.Sleep(seconds * time.Second)
	for _, pid := range pids {
		wakeups += switches(t, pid)
	}
	t.Logf("per monitor: Pss %d KiB, private dirty %d KiB, %.1f threads; %.2f wake-ups a second",
		pss/monitors, private/monitors, float64(threads)/monitors, float64(wakeups)/monitors/seconds)
	if private/monitors > 510 { // it was 480 to 490
		t.Errorf("%d KiB of private memory in an idle monitor", private/monitors)
	}
	if wakeups > monitors {
		t.Errorf("%d wake-ups in %d seconds of %d idle monitors", wakeups, seconds, monitors)
	}
}

// cri-o#6403: what grows with every request will be large one day.
func TestRequestsCostNothing(t *testing.T) {
	c := newContainer(t, "crun", "sleep")
	client := c.run()
	const requests = 30_000
	ctx := limit(t, time.Minute)
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
	after := rollup(t, monitor, "Anonymous:")
	t.Logf("%d KiB, after %d rotations %d KiB", before, requests, after)
	if after > before+64 {
		t.Errorf("%d KiB of private memory, after %d rotations %d KiB", before, requests, after)
	}
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
	time.Sleep(1500 * time.Millisecond)
	after := rollup(t, monitor, "Anonymous:")
	t.Logf("%d KiB, while it wrote %d, afterwards %d", before, during, after)
	if after > before+32 { // during says nothing: it may have fallen silent by then
		t.Errorf("%d KiB, while it wrote %d, afterwards %d", before, during, after)
	}
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
