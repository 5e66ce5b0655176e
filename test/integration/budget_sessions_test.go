//go:build budgets

package integration

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// A command over a stream costs the server the same few objects, however many
// there have been.
func TestBudgetExecStream(t *testing.T) {
	w := private(t, node.Options{})
	c := w.run(t, "crun", kubelet.HostNetwork).start(t, "sleep")
	const sessions, objects = 50, 1300
	each := w.least(t, "go_memstats_mallocs_total", func() (run func()) {
		return func() {
			for range sessions {
				endsWith(t, c.session(t, w.spdy(), "exit 3"), 3)
			}
		}
	}) / sessions
	t.Logf("a command over a stream takes %.0f objects", each)
	if each > objects {
		t.Errorf("a command over a stream takes %.0f objects, its budget is %d", each, objects)
	}
}

// What a session carries passes through few buffers.
func TestBudgetCarriedBytes(t *testing.T) {
	w := private(t, node.Options{})
	p := w.run(t, "crun", kubelet.HostNetwork)
	const carried = 32 << 20
	line := fmt.Sprintf("noise %d", carried)
	runner := p.start(t, "sleep")
	for name, prepare := range map[string]func() (run func()){
		"exec": func() func() {
			return func() {
				s := runner.session(t, w.spdy(), line)
				endsWith(t, s, 0)
				equal(t, "bytes of exec", len(s.Stdout.String()), carried)
			}
		},
		"attach": func() func() {
			talker := p.start(t, "line ; "+line+" ; exit 4", stdin)
			return func() {
				s := talker.attach(t, w.spdy(), attachInput)
				must(t, s.Type("go\n"))
				must(t, s.Wait(wait.Limit))
				equal(t, "bytes of attach", len(s.Stdout.String()), len("got \"go\"\n")+carried)
			}
		},
	} {
		bytes := w.least(t, "go_memstats_alloc_bytes_total", prepare)
		t.Logf("%s: for %d bytes the server allocates %.0f", name, carried, bytes)
		if bytes > carried/8 {
			t.Errorf("%s: for %d bytes the server allocates %.0f, its budget is an eighth of them", name, carried, bytes)
		}
	}
}

// least returns by how much a counter of the server grows in the cheapest of
// some runs, which is the one with the least else going on.
func (w *world) least(t *testing.T, counter string, prepare func() (run func())) float64 {
	t.Helper()
	growth := func(prepare func() (run func())) (least float64) {
		for i := range 5 {
			run := prepare()
			before := w.metric(t, counter)
			run()
			if grown := w.metric(t, counter) - before; i == 0 || grown < least {
				least = grown
			}
		}
		return least
	}
	reading := growth(func() func() { return func() {} })
	prepare()() // some of what the first run needs is kept
	return growth(prepare) - reading
}

// restTime is longer than a monitor waits for something to do before it rests.
const restTime = 12 * time.Second

// A crash of the server wakes no monitor that has nothing to do, and nor does
// the server that follows.
func TestBudgetCrashWakesNobody(t *testing.T) {
	w := private(t, node.Options{})
	p := w.run(t, "crun", kubelet.HostNetwork)
	const containers = 10
	var monitors []int
	for range containers {
		monitors = append(monitors, w.monitors(t, p.start(t, "sleep").id)...)
	}
	slept := func() (n int) {
		for _, pid := range monitors {
			n += sleeps(t, pid)
		}
		return n
	}
	pause := func() (n int) {
		wait.For(t, "the monitors to rest", func() bool {
			before := slept()
			time.Sleep(restTime)
			n = slept()
			return n == before
		})
		return n
	}
	before := pause()
	must(t, w.Crash(t.Context()))
	pause()
	if now := slept(); now != before {
		t.Errorf("%d monitors have slept %d times since the crash, want none", containers, now-before)
	}
}

// sleeps returns how often a process has slept, as the kernel counts.
func sleeps(t *testing.T, pid int) (n int) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	_, count, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:")
	_, err = fmt.Sscan(count, &n)
	must(t, err)
	return n
}
