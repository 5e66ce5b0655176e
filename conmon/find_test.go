package conmon_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/crius-run/crius/conmon"
)

// Monitors are found by name and command line, and what only looks like one is
// none.
func TestMonitorsAreFound(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "crius-conmon")
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(sleep, program); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()

	c := newContainer(t, runtimes[0], "sleep")
	client := c.run()
	want := conmon.Monitor{Process: c.processes().Monitor, ID: c.ID, Dir: c.Dir}
	list := func() []conmon.Monitor {
		found, err := conmon.Monitors()
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	if found := list(); !slices.Contains(found, want) || slices.ContainsFunc(found, func(m conmon.Monitor) bool { return m.PID == cmd.Process.Pid }) {
		t.Errorf("%+v, want %+v among them", found, want)
	}
	if err := client.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a dead one not to be found", func() bool { return !slices.Contains(list(), want) })
}
