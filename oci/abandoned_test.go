package oci

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"
)

// The clock may be set after a command was started: the next server finds the
// command all the same, and takes no later process with its pid for it.
func TestAbandonedCommandIsKnownThoughTheClockWasSet(t *testing.T) {
	t.Parallel()
	process := exec.Command("sleep", "1h")
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = process.Process.Kill(), process.Wait() })
	began := time.Now()
	ref := Ref{Dir: t.TempDir(), Holder: "pod", Cgroup: "/crius-none"}
	since1970 := time.Since(time.Unix(0, 0)) // from where the clock of a machine without battery begins, or from before that
	for _, set := range []time.Duration{0, -24 * time.Hour, 24 * time.Hour, since1970 + 24*time.Hour} {
		for name, one := range map[string]struct {
			written time.Duration // after the process began
			want    bool
		}{"the command": {0, true}, "a later process": {-time.Minute, false}} {
			then := func(now time.Time) time.Time { return now.Add(-set) } // as the clock was before
			dir, err := os.MkdirTemp(ref.Dir, execDirs+fmt.Sprint(then(booted()).UnixMilli())+"-")
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(pidFileOf(dir), fmt.Append(nil, process.Process.Pid), 0o600); err != nil {
				t.Fatal(err)
			}
			at := then(began.Add(one.written))
			if err := os.Chtimes(pidFileOf(dir), at, at); err != nil {
				t.Fatal(err)
			}
			e := &execution{}
			e.PID, _ = readPid(pidFileOf(dir))
			if got := e.hasStarted(ref, dir); got != one.want {
				t.Errorf("%s, after the clock was set by %s: taken for the command: %t", name, set, got)
			}
		}
	}
}
