package conmon_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/wait"
)

// A monitor's capabilities: CAP_KILL, and CAP_DAC_OVERRIDE if its log needs
// that.
const (
	onlyKill    = 1 << unix.CAP_KILL
	andOverride = onlyKill | 1<<unix.CAP_DAC_OVERRIDE
)

// hasOnly checks the capabilities of all threads of the container's monitor.
func (c *container) hasOnly(when string, capabilities uint64) {
	c.Helper()
	pid := c.processes().Monitor.PID
	for _, task := range tasksOf(c.TB, pid) {
		status, err := os.ReadFile(task + "/status")
		if err != nil {
			continue // the thread has ended
		}
		for name, want := range map[string]string{
			"CapEff": fmt.Sprintf("%016x", capabilities), "CapPrm": fmt.Sprintf("%016x", capabilities),
			"CapInh": fmt.Sprintf("%016x", 0), "CapAmb": fmt.Sprintf("%016x", 0), "NoNewPrivs": "1",
		} {
			if !strings.Contains(string(status), "\n"+name+":\t"+want+"\n") {
				c.Errorf("%s: thread %s has not %s %s:\n%s", when, filepath.Base(task), name, want, status)
			}
		}
	}
}

func tasksOf(t testing.TB, pid int) []string {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil || len(tasks) == 0 {
		t.Fatalf("the monitor has no threads: %v", err)
	}
	return tasks
}

// Before the container's program runs a monitor loses most of root's rights,
// and yet can do all of its work.
func TestMonitorsHaveFewCapabilities(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "tty")
		c.Terminal, c.Stdin = true, true
		c.ociProcess()["user"] = map[string]any{"uid": 1234, "gid": 1234}
		client := c.launch()
		c.hasOnly("after the create", onlyKill)
		c.start()
		c.awaitLog("terminal")
		c.hasOnly("after the start", onlyKill)
		must(os.Rename(c.LogFile, c.LogFile+".1"))
		must(client.ReopenLog(limit(t)))
		c.hasOnly("after log rotation", onlyKill)
		must(client.Resize(limit(t), 132, 43))
		e := exit(t, client)
		if out, _ := c.log(); e.Code != 0 || !strings.Contains(out, "size 132 43") {
			t.Errorf("exit %+v, %q", e, out)
		}
		c.checkGone(client, e)

		c = newContainer(t, runtime, "sleep")
		c.ociProcess()["user"] = map[string]any{"uid": 1234, "gid": 1234}
		client = c.run()
		command := c.exec("sleep")
		// A runtime that is killed meanwhile leaves a child in the PID namespace, which nobody reaps here.
		wait.For(t, "the command", func() bool { return c.running("sleep") == 2 })
		c.hasOnly("with a command", onlyKill)
		client.Close()
		client = c.dial()
		c.hasOnly("with another server", onlyKill)
		must(client.Release(limit(t))) // which kills another user's process
		if e := exit(t, client); e.Code != 137 {
			t.Errorf("exit %+v", e)
		}
		<-command
	})
}

// Logs may be in a directory that does not belong to root.
func TestMonitorWritesIntoDirectoriesOfOthers(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]os.FileMode{"readable": 0o755, "private": 0o700} {
		c := newContainer(t, "crun", "copy")
		c.Stdin, c.RestAfter = true, time.Hour
		dir := filepath.Join(c.Dir, "logs")
		must(os.Mkdir(dir, mode))
		c.LogFile = filepath.Join(dir, "log")
		must(os.Chown(dir, 1234, 1234))
		client := c.run()
		c.hasOnly(name, andOverride)
		must(os.Rename(c.LogFile, c.LogFile+".1"))
		must(client.ReopenLog(limit(t)))
		must(client.CloseStdin(limit(t)))
		e := exit(t, client)
		if out, _ := c.log(); out != "end of input\n" || e.Code != 0 {
			t.Errorf("%s: exit %+v, %q in the second log", name, e, out)
		}
	}
}
