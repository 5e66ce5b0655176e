package conmon_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

func TestExit(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		for _, code := range []int32{0, 7, 255} {
			c := newContainer(t, runtime, "exit", fmt.Sprint(code), "0")
			before := time.Now()
			client := c.launch()
			if p := c.processes().Container; p != client.Process() || client.PID() != p.PID || !conmon.Alive(p) {
				t.Errorf("container %+v, client says %+v", p, client.Process())
			}
			if _, err := conmon.ReadExit(c.ExitFile); !errors.Is(err, fault.NotFound) {
				t.Errorf("exit file before the exit: %v", err)
			}
			c.start()
			e := exit(t, client)
			if e.Code != code || e.Signal != 0 || e.OOMKills != 0 {
				t.Errorf("exit %+v, want code %d", e, code)
			}
			if e.FinishedAt.Before(before) || e.FinishedAt.After(time.Now()) {
				t.Errorf("finished at %v, started after %v", e.FinishedAt, before)
			}
			c.checkGone(client, e)
		}
	})
}

// checkGone checks what remains of an exited container without a running
// monitor: the exit file, and no process.
func (c *container) checkGone(client *conmon.Client, want conmon.Exit) {
	c.Helper()
	if e, err := conmon.ReadExit(c.ExitFile); err != nil || e != want {
		c.Errorf("exit file: %+v, %v; the client was told %+v", e, err, want)
	}
	if client.PID() != 0 {
		c.Errorf("pid %d of an exited container", client.PID())
	}
	monitor := c.processes().Monitor
	wait.For(c.TB, "the monitor to leave and be reaped", func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/%d", monitor.PID))
		return errors.Is(err, os.ErrNotExist)
	})
	if !c.refuses() {
		c.Error("somebody listens on the socket of a dead monitor")
	}
	again, err := conmon.Dial(limit(c.TB), c.Dir, c.ExitFile)
	if err != nil {
		c.Fatalf("dial after the end: %v", err)
	}
	if e, err := again.Exit(); err != nil || e != want || again.PID() != 0 {
		c.Errorf("dialled after the end: %+v, %v", e, err)
	}
	if err := again.ReopenLog(c.Context()); !errors.Is(err, fault.Precondition) {
		c.Errorf("reopen log after the end: %v", err)
	}
	if err := errors.Join(again.Signal(unix.SIGKILL), again.Release(c.Context()), again.Close()); err != nil {
		c.Error(err)
	}
}

func TestSignals(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		for name, test := range map[string]struct {
			verb, armed string
			signal      unix.Signal
			want        conmon.Exit
		}{
			"killed":          {"sleep", "", unix.SIGKILL, conmon.Exit{Code: 137, Signal: 9}},
			"handled":         {"trap", "armed", unix.SIGTERM, conmon.Exit{Code: 42}},
			"default":         {"sleep", "", unix.SIGTERM, conmon.Exit{Code: 143, Signal: 15}},
			"default, dumped": {"sleep", "", unix.SIGABRT, conmon.Exit{Code: 134, Signal: 6}},
		} {
			c := newContainer(t, runtime, test.verb)
			c.hostPID() // PID 1 of a namespace ignores what it does not handle
			client := c.launch()
			if test.signal != unix.SIGKILL { // which a container that waits to be started obeys too
				c.start()
			}
			if test.armed != "" {
				c.awaitLog(test.armed)
			} else if test.signal != unix.SIGKILL {
				wait.For(t, "the probe", func() bool {
					name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", client.PID()))
					return string(name) == "probe\n"
				})
			}
			process := client.Process()
			if err := client.Signal(test.signal); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			e := exit(t, client)
			if e.Code != test.want.Code && !(test.signal == unix.SIGABRT && e.Code == 2) { // the Go runtime's own handling of the signal
				t.Errorf("%s: exit %+v, want %+v", name, e, test.want)
			}
			if err := errors.Join(client.Signal(unix.SIGTERM), conmon.Signal(process, unix.SIGTERM)); err != nil {
				t.Errorf("%s: signal to the dead: %v", name, err)
			}
		}
	})
}

// cri-o#9932: an exit that was too fast to be observed was reported as 255.
func TestFastExits(t *testing.T) {
	t.Parallel()
	for runtime, count := range map[string]int{"crun": 40, "runc": 20} {
		t.Run(runtime, func(t *testing.T) {
			t.Parallel()
			var wg sync.WaitGroup
			for range 2 {
				wg.Go(func() {
					for range count / 2 {
						code := rand.Int32N(256)
						c := newContainer(t, runtime, "exit", fmt.Sprint(code), fmt.Sprint(rand.IntN(5000)))
						if e := exit(t, c.run()); e.Code != code || e.Signal != 0 {
							t.Errorf("exit %+v, want code %d", e, code)
						}
						c.destroy()
					}
				})
			}
			wg.Wait()
		})
	}
}

// A container may die before it is even started, whatever kills it.
func TestDeathBeforeStart(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "sleep")
		client := c.launch()
		if text, err := c.command("delete", "--force", c.ID); err != nil {
			t.Fatalf("delete: %v: %s", err, text)
		}
		e := exit(t, client)
		if e.Code != 137 || e.Signal != 9 {
			t.Errorf("exit %+v", e)
		}
		c.checkGone(client, e)
	})
}

func TestTerminal(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "tty")
		c.Terminal, c.Stdin = true, true
		client := c.run()
		ctx := limit(t)
		c.awaitLog("terminal /dev/")
		if err := client.Resize(ctx, 132, 43); err != nil {
			t.Fatal(err)
		}
		if err := client.CloseStdin(ctx); err == nil {
			t.Error("the input of a terminal was closed")
		}
		e := exit(t, client)
		stdout, stderr := c.log()
		if e.Code != 0 || !strings.Contains(stdout, "\nsize 132 43\r\n") || stderr != "" {
			t.Errorf("exit %+v, stdout %q, stderr %q", e, stdout, stderr)
		}
		if _, err := os.Stat(filepath.Join(c.Dir, "console.sock")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("console socket: %v", err)
		}
		c.checkGone(client, e)
	})
}

// A terminal that no process has open for a while has not ended.
func TestTerminalLetGo(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "letgo")
	c.Terminal = true
	client := c.run()
	c.awaitHangUp(client)
	if err := client.Signal(unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	c.awaitLog("after")
}

// awaitHangUp waits until the probe has closed its terminal.
func (c *container) awaitHangUp(client *conmon.Client) {
	c.Helper()
	c.awaitLog("before")
	wait.For(c.TB, "the terminal to be let go", func() bool {
		_, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/1", client.PID()))
		return errors.Is(err, os.ErrNotExist)
	})
}

func TestStdin(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		none := newContainer(t, runtime, "copy")
		client := none.run()
		if e := exit(t, client); e.Code != 0 {
			t.Errorf("without stdin: exit %+v", e)
		}
		none.awaitLog("end of input")

		held := newContainer(t, runtime, "copy")
		held.Stdin, held.StdinOnce = true, true
		client = held.run()
		ctx := limit(t)
		if err := client.Resize(ctx, 80, 25); err == nil {
			t.Error("a pipe was resized")
		}
		select {
		case <-client.Exited():
			t.Fatal("stdin was not held open")
		case <-time.After(50 * time.Millisecond):
		}
		if err := client.CloseStdin(ctx); err != nil {
			t.Fatal(err)
		}
		// A repetition succeeds too, unless the monitor is done by now.
		if err := client.CloseStdin(ctx); err != nil && !errors.Is(err, fault.Precondition) {
			t.Fatal(err)
		}
		if e := exit(t, client); e.Code != 0 {
			t.Errorf("with stdin: exit %+v", e)
		}
		held.awaitLog("end of input")
	})
}

// The init's exit is reported at once, even if a process that no longer belongs
// to the container keeps the log open; that process's output is not lost
// either.
func TestOutlivedByChild(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "orphan")
		c.Stdin = true
		c.hostPID()
		client := c.run()
		late := c.leaver("early words")
		must(client.CloseStdin(limit(t)))
		e := exit(t, client)
		stdout, _ := c.log()
		if e.Code != 7 || stdout != "early words\n" {
			t.Errorf("exit %+v, stdout %q", e, stdout)
		}
		again, err := conmon.Dial(limit(t), c.Dir, c.ExitFile)
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		if got := exit(t, again); got != e {
			t.Errorf("a client that comes late is told %+v, not %+v", got, e)
		}
		if c.refuses() {
			t.Error("the monitor has left a container that still speaks")
		}
		if err := again.ReopenLog(limit(t)); err != nil {
			t.Error(err)
		}
		if err := unix.Kill(late, unix.SIGUSR1); err != nil {
			t.Fatal(err)
		}
		c.awaitLog("early words\nlate words\n")
		c.checkGone(client, e)
	})
}

// leaver moves the child of the container's first process out of its cgroup,
// once the container has printed words. It no longer belongs to the container
// then.
func (c *container) leaver(words string) (pid int) {
	c.Helper()
	c.awaitLog(words)
	all, err := cgroup.Procs(c.cgroup)
	if err != nil || len(all) != 2 {
		c.Fatalf("processes %v, %v", all, err)
	}
	pid = all[0] + all[1] - c.processes().Container.PID
	away := c.cgroup + "-away"
	if err := errors.Join(cgroup.Make(away), cgroup.Move(away, pid)); err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() {
		if err := errors.Join(cgroup.Kill(limit(c.TB), away), cgroup.Remove(context.Background(), away)); err != nil {
			c.Error(err)
		}
	})
	return pid
}

// conmon zombies: a container in the PID namespace of the host leaves its
// orphans to the monitor.
func TestOrphansAreReaped(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "crun", "litter", "30")
	c.hostPID()
	c.run()
	c.awaitLog("littered")
	wait.For(t, "all orphans to be reaped", func() bool {
		return len(children(t, c.processes().Monitor.PID)) == 1 // the init
	})
}

// tasks returns the threads of a process.
func tasks(t *testing.T, pid int) []os.DirEntry {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

// children returns the children of a process, dead and alive.
func children(t *testing.T, pid int) (pids []string) {
	t.Helper()
	for _, task := range tasks(t, pid) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task.Name()))
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, strings.Fields(string(text))...)
	}
	return pids
}

// CVE-2024-21626: no descriptor except the standard three reaches the
// container, not even one that this process carelessly lets its children
// inherit.
func TestDescriptors_CVE_2024_21626(t *testing.T) {
	careless, err := unix.Open("/etc", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(careless)
	for _, runtime := range runtimes {
		c := newContainer(t, runtime, "fds")
		c.Stdin = true
		exit(t, c.run())
		stdout, _ := c.log()
		lines := strings.Split(strings.TrimSpace(stdout), "\n")
		if len(lines) != 4 || !strings.HasPrefix(lines[0], "fd 0 pipe:") || !strings.HasPrefix(lines[1], "fd 1 pipe:") ||
			!strings.HasPrefix(lines[2], "fd 2 pipe:") || lines[3] != "done" {
			t.Errorf("%s: %q", runtime, lines)
		}
	}
}

// containerd#6323, #8893: every OOM kill is counted, and nothing else is.
func TestOOM(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		limited := func(args ...string) *container {
			c := newContainer(t, runtime, args...)
			c.linux()["resources"] = map[string]any{"memory": map[string]any{"limit": 32 << 20}}
			return c
		}
		if e := exit(t, limited("eat", "100").run()); e.Code != 137 || e.OOMKills == 0 {
			t.Errorf("out of memory: %+v", e)
		}
		if e := exit(t, limited("feed", "100").run()); e.Code != 0 || e.OOMKills == 0 {
			t.Errorf("child out of memory: %+v", e)
		}
		if e := exit(t, limited("eat", "1").run()); e.Code != 0 || e.OOMKills != 0 {
			t.Errorf("enough memory: %+v", e)
		}
		client := limited("sleep").run()
		if err := client.Signal(unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if e := exit(t, client); e.Code != 137 || e.OOMKills != 0 {
			t.Errorf("killed: %+v", e)
		}
	})
}

func TestRelease(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime, "sleep")
		client := c.run()
		if err := client.Release(limit(t)); err != nil {
			t.Fatal(err)
		}
		e := exit(t, client)
		if e.Code != 137 {
			t.Errorf("exit %+v", e)
		}
		c.checkGone(client, e)

		// Other processes that hold the log do not keep a released monitor alive.
		c = newContainer(t, runtime, "orphan")
		c.Stdin = true
		c.hostPID()
		client = c.run()
		late := c.leaver("early words")
		must(client.CloseStdin(limit(t)))
		e = exit(t, client)
		if err := client.Release(limit(t)); err != nil {
			t.Fatal(err)
		}
		c.checkGone(client, e)
		must(unix.Kill(late, unix.SIGKILL))
	})
}
