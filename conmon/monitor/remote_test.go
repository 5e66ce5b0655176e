package monitor

import (
	"path/filepath"
	"testing"

	"github.com/crius-run/crius/conmon/wire"
)

// waiting is the monitor of a started container whose waiting command is argv.
func waiting(t *testing.T, argv ...string) *monitor {
	t.Helper()
	m := newMonitor(wire.Options{ID: "id", ExitFile: filepath.Join(t.TempDir(), "exit.json"), Wait: argv}, nil)
	m.complaints = 1 << 20 // not into the output of the test
	m.state = running
	return m
}

// However often the command cannot be run or cannot be watched, the container lives on, and no
// command is left behind.
func TestWaitThatCannotBeRunEndsNothing(t *testing.T) {
	t.Parallel()
	for what, m := range map[string]*monitor{"run": waiting(t, "/none"), "watched": waiting(t, "/bin/sleep", "1000")} { // it has no poller
		for range 100 {
			if m.await(); m.state == exited || !m.remote.again || m.remote.pid != 0 || m.remote.pidfd != -1 || m.remote.result != -1 {
				t.Fatalf("a command that cannot be %s: state %v, %+v", what, m.state, m.remote)
			}
		}
	}
}

// A command that has run and failed some times one after the other is the end, and one that
// cannot be run in between is not counted. One that had run for long starts the count again.
func TestWaitThatFailsIsTheEnd(t *testing.T) {
	t.Parallel()
	m := waiting(t, "/none")
	fail := func(times int) {
		for range times {
			m.remote.since = uptime()
			m.waitFailed(false)
			m.waitFailed(true)
		}
	}
	fail(20)
	m.remote.since = uptime() - 3_600_000
	m.waitFailed(true)
	fail(20)
	if m.state == exited {
		t.Fatal("given up too early")
	}
	fail(10)
	if m.state != exited || m.exit.Code != killed.Code {
		t.Errorf("state %v, exit %+v", m.state, m.exit)
	}
}
