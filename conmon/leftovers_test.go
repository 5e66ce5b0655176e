package conmon_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/test/kit/hangfs"
	"github.com/crius-run/crius/test/kit/wait"
)

// sharing are ways to give the container a PID namespace that does not end with
// it.
var sharing = map[string]func(t *testing.T, c *container){
	"of the node": func(_ *testing.T, c *container) { c.hostPID() },
	"of another":  func(t *testing.T, c *container) { c.join(newContainer(t, c.runtime, "sleep")) },
}

// join runs other and puts the container into its PID namespace.
func (c *container) join(other *container) {
	c.Helper()
	pid := namespace("pid")
	pid["path"] = fmt.Sprintf("/proc/%d/ns/pid", other.run().PID())
	c.linux()["namespaces"] = []any{pid, namespace("mount"), namespace("ipc"), namespace("uts")}
}

// listed returns the processes in the container's cgroup.
func (c *container) listed() []int {
	c.Helper()
	pids, err := cgroup.Procs(c.cgroup)
	if err != nil {
		c.Fatal(err)
	}
	return pids
}

// all returns those of them whose main thread is alive.
func (c *container) all() (alive []int) {
	c.Helper()
	return slices.DeleteFunc(c.listed(), func(pid int) bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		_, state, _ := strings.Cut(string(stat), ") ")
		return err != nil || strings.HasPrefix(state, "Z")
	})
}

// running returns how many of them run the probe with this argument, and no
// longer the runtime.
func (c *container) running(word string) (n int) {
	c.Helper()
	for _, pid := range c.all() {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if program, arguments, _ := strings.Cut(string(line), "\x00"); !strings.Contains(filepath.Base(program), "run") && arguments == word+"\x00" {
			n++
		}
	}
	return n
}

// When the first process has ended, and before that is reported, no process of
// the container is alive, in any PID namespace, and its log has their output.
func TestNothingOutlivesTheFirstProcess(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		for name, share := range sharing {
			for user, uid := range map[string]int{"root": 0, "somebody": 1234} {
				t.Run(name+", as "+user, func(t *testing.T) {
					t.Parallel()
					c := newContainer(t, runtime, "brood", "sleep", "deaf", "daemon", "tick,1", "litter,3")
					c.Stdin, c.RestAfter = true, time.Hour
					c.ociProcess()["user"] = map[string]any{"uid": uid, "gid": uid}
					share(t, c)
					client := c.run()
					c.awaitLog("littered")
					c.awaitLog("brooding")
					wait.For(t, "both deaf children", func() bool { out, _ := c.log(); return strings.Count(out, "deaf") == 2 })
					command := c.exec("deaf")
					// Not only the runtime that starts it, which would continue after the
					// end.
					wait.For(t, "the command", func() bool { return c.running("deaf") == 3 })
					must(client.CloseStdin(limit(t)))
					e := exit(t, client)
					if left := c.all(); len(left) > 0 {
						t.Fatalf("alive when the exit is known: %v", left)
					}
					if e.Code != 7 || e.OOMKills != 0 || e.Message != "" {
						t.Errorf("exit %+v", e)
					}
					<-command
					out, _ := c.log()
					for i := range strings.Count(out, "tick") {
						if !strings.Contains(out, fmt.Sprintf("tick %d\n", i)) {
							t.Errorf("tick %d is not in the log", i)
						}
					}
					c.checkGone(client, e)
				})
			}
		}
	})
}

// inItsOwnMounts gives the monitor a mount namespace in which script has
// changed something.
func (c *container) inItsOwnMounts(script string) {
	c.Helper()
	wrapped := filepath.Join(c.Dir, "monitor")
	text := fmt.Sprintf("#!/bin/sh\nexec unshare --mount --propagation private sh -c '%s && exec %s \"$@\"' sh \"$@\"\n", script, c.Monitor)
	must(os.WriteFile(wrapped, []byte(text), 0o700))
	c.Monitor = wrapped
}

// The kernel lists every process in its cgroup, including one whose main thread
// has ended, which /proc shows as a zombie in the root of cgroup v1
// hierarchies, and those that /proc hides from a monitor with few capabilities.
// If cgroup v2 is visible it kills the cgroup as a whole.
func TestProcessesThatProcDoesNotShowEndWithTheContainer(t *testing.T) {
	const v1 = "if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi"
	everyRuntime(t, func(t *testing.T, runtime string) {
		for name, script := range map[string]string{
			"main thread has ended": v1,
			"hidepid":               v1 + " && mount -t proc -o hidepid=2,gid=4242 proc /proc",
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				c := newContainer(t, runtime, "brood", "headless", "deaf")
				c.Stdin = true
				c.ociProcess()["user"] = map[string]any{"uid": 1234, "gid": 1234}
				c.hostPID()
				c.inItsOwnMounts(script)
				client := c.run()
				c.awaitLog("brooding")
				c.awaitLog("deaf")
				wait.For(t, "a main thread to end", func() bool { return len(c.listed()) == 3 && len(c.all()) == 2 })
				must(client.CloseStdin(limit(t)))
				e := exit(t, client)
				if left := c.listed(); len(left) > 0 || e.Code != 7 || e.Message != "" {
					t.Errorf("exit %+v, alive: %v", e, left)
				}
			})
		}
	})
}

// exec runs the probe in the container, until it ends.
func (c *container) exec(args ...string) (ended <-chan struct{}) {
	end := make(chan struct{})
	go func() {
		defer close(end)
		_, _ = c.command(append([]string{"exec", c.ID, "/probe"}, args...)...)
	}()
	c.Cleanup(func() {
		_ = cgroup.Kill(limit(c.TB), c.cgroup)
		<-end
	})
	return end
}

// A fork bomb is killed nevertheless.
func TestForkBombEndsWithItsContainer(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "brood", "bomb")
		c.Stdin = true
		c.linux()["resources"] = map[string]any{"pids": map[string]any{"limit": 200}}
		c.join(newContainer(t, runtime, "sleep"))
		client := c.run()
		wait.For(t, "many processes", func() bool { return len(c.all()) > 10 })
		must(client.CloseStdin(limit(t)))
		e := exit(t, client)
		if left := c.all(); len(left) > 0 || e.Code != 7 {
			t.Errorf("exit %+v, alive: %v", e, left)
		}
	})
}

// Cgroups that the container has made below its own are its own, frozen or not.
// Processes in those of a single cgroup v1 hierarchy are still in its cgroup in
// all others.
func TestProcessesInCgroupsBelowEndWithTheContainer(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "brood", "deaf")
		c.Stdin = true
		c.hostPID()
		client := c.run()
		c.awaitLog("deaf")
		child := 0
		for _, pid := range c.all() {
			if pid != client.PID() {
				child = pid
			}
		}
		inner := c.cgroup + "/below/this"
		must(errors.Join(cgroup.Make(inner), cgroup.Move(inner, child)))
		freeze(t, filepath.Dir(inner))
		must(client.CloseStdin(limit(t)))
		e := exit(t, client)
		if left := c.all(); len(left) > 0 || e.Message != "" {
			t.Errorf("exit %+v, alive: %v", e, left)
		}
	})
}

// freeze freezes a cgroup, of either version.
func freeze(t *testing.T, group string) {
	t.Helper()
	for file, text := range map[string]string{
		"/sys/fs/cgroup/freezer" + group + "/freezer.state": "FROZEN",
		"/sys/fs/cgroup" + group + "/cgroup.freeze":         "1",
		"/sys/fs/cgroup/unified" + group + "/cgroup.freeze": "1",
	} {
		if _, err := os.Stat(file); err == nil {
			must(os.WriteFile(file, []byte(text), 0))
		}
	}
}

// Kata's shim reports the pid of the virtual machine, whose processes, like the
// shim itself, may be in the cgroup of the pod's own container
// (sandbox_cgroup_only): the monitor must not kill these.
func TestMonitorKillsNothingInTheCgroupOfAStandIn(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "brood", "deaf")
		c.Stdin, c.Guest = true, true
		c.hostPID()
		client := c.run()
		c.awaitLog("deaf")
		must(client.CloseStdin(limit(t)))
		if e := exit(t, client); e.Code != 7 || e.Message != "" {
			t.Errorf("exit %+v", e)
		}
		if left := c.all(); len(left) != 1 {
			t.Errorf("alive: %v, want one process", left)
		}
	})
}

// unkillable runs a container with a process that the kernel cannot kill before
// release.
func unkillable(t *testing.T) (c *container, client *conmon.Client, release func()) {
	t.Helper()
	f, err := hangfs.Mount(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	release = sync.OnceFunc(func() { must(f.Release()) })
	t.Cleanup(release)
	c = newContainer(t, "crun", "brood", "stat,/tmp/file")
	t.Cleanup(release) // before the container is destroyed
	c.Stdin = true
	c.config["mounts"] = append(c.config["mounts"].([]any), map[string]any{"destination": "/tmp", "type": "bind", "source": f.Dir, "options": []string{"rbind"}})
	c.hostPID()
	client = c.run()
	wait.For(t, "a process to hang", func() bool { return f.Waiting() > 0 })
	return c, client, release
}

// A process that the kernel cannot kill now does not delay the exit for ever,
// and the exit names it.
func TestExitNamesWhatCannotBeKilled(t *testing.T) {
	t.Parallel()
	c, client, release := unkillable(t)
	must(client.CloseStdin(limit(t)))
	e := exit(t, client)
	left := c.all()
	if len(left) != 1 || e.Code != 7 || !strings.Contains(e.Message, fmt.Sprintf("still alive after SIGKILL: %d", left[0])) {
		t.Errorf("exit %+v, alive: %v", e, left)
	}
	if file, err := conmon.ReadExit(c.ExitFile); err != nil || file != e {
		t.Errorf("exit file %+v, %v", file, err)
	}
	again := c.dial()
	if got := exit(t, again); got != e {
		t.Errorf("who comes later is told %+v", got)
	}
	release()
	wait.For(t, "its end", func() bool { return len(c.all()) == 0 })
}

// A released monitor does not exit before it has recorded what cannot be
// killed.
func TestReleaseRecordsWhatCannotBeKilled(t *testing.T) {
	t.Parallel()
	c, client, _ := unkillable(t)
	must(client.Release(limit(t)))
	gone(t, c.processes().Monitor)
	left := c.all()
	e, err := conmon.ReadExit(c.ExitFile)
	if err != nil || e.Code != 137 || len(left) != 1 || !strings.Contains(e.Message, fmt.Sprintf("still alive after SIGKILL: %d", left[0])) {
		t.Errorf("exit %+v, %v, alive: %v", e, err, left)
	}
	if told, err := client.Exit(); told != e {
		t.Errorf("told: %+v, %v", told, err)
	}
}
