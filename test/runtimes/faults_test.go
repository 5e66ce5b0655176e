package runtimes

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// The server stops and returns, gracefully and not, and finds everything as it
// was.
func TestServerRestart(t *testing.T) {
	eachPrivate(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		talker := p.Start(t, "trap SIGUSR1 ; echo later ; sleep")
		talker.Says(t, "ready")
		reader := p.Start(t, "until bye ; exit 3", func(c *cri.ContainerConfig) { c.Stdin = true })
		waiting := p.Create(t, "exit 4")
		shortLived := p.Start(t, "await /tmp/end ; exit 6")
		for name, again := range map[string]func() error{
			"restart": func() error { return w.Restart(t.Context()) },
			"crash":   func() error { return w.Crash(t.Context()) },
		} {
			if err := again(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			scene.Equal(t, "state after a "+name, talker.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
			answersNewServer(t, talker)
			scene.Equal(t, "command after a "+name, talker.Exec(t, "echo here"), "here\n")
		}
		shortLived.Last(t, "write /tmp/end now")
		if err := w.Kill(); err != nil {
			t.Fatal(err)
		}
		exitNoted(t, shortLived)
		if err := w.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		scene.Equal(t, "exit code of one that ended meanwhile", shortLived.Status(t).ExitCode, int32(6))
		s := attach(t, reader)
		meet(t, s)
		if err := s.Type("bye\n"); err != nil {
			t.Error(err)
		}
		scene.Equal(t, "exit code", reader.Wait(t).ExitCode, int32(3))
		waiting.Start(t)
		scene.Equal(t, "exit code of one that was not started before", waiting.Wait(t).ExitCode, int32(4))
		p.Start(t, "sleep")
	})
}

// The command of a server that was killed is ended by the next one.
func TestExecSyncOfAKilledServerIsEnded(t *testing.T) {
	eachPrivate(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		ended := make(chan error, 1)
		go func() {
			_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"/probe", "sleep"}})
			ended <- err
		}()
		wait.For(t, "the command to run", func() bool { return len(c.Facts(t).Processes) == 3 })
		wait.For(t, "its shim to know that", func() bool { return commandsStarted(t, c) })
		if err := w.Crash(t.Context()); err != nil {
			t.Fatal(err)
		}
		scene.WantCode(t, <-ended, codes.Unavailable)
		answersNewServer(t, c)
		alone(t, c)
		wait.For(t, "the directories of commands to go", func() bool { return len(execDirs(c)) == 0 })
	})
}

// A shim ends what it does for a caller that dies; the start of a container goes
// on without the server that was asked for it.
func TestServerDiesDuringAStart(t *testing.T) {
	eachPrivateOf(t, shims(), func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Create(t, "exit 3")
		pid, _ := shimOf(t, runDir(c))
		if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		defer unix.Kill(pid, unix.SIGCONT)
		started := make(chan error, 1)
		go func() {
			_, err := w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.ID})
			started <- err
		}()
		wait.For(t, "the start to be under way", func() bool {
			return len(running(func(args []string) bool { return slices.Contains(args, "start") && slices.Contains(args, c.ID) })) > 0
		})
		if err := w.Kill(); err != nil {
			t.Fatal(err)
		}
		scene.WantCode(t, <-started, codes.Unavailable)
		if err := errors.Join(unix.Kill(pid, unix.SIGCONT), w.Start(t.Context())); err != nil {
			t.Fatal(err)
		}
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(3))
	})
}

// commandsStarted reports whether the shim of a container, if it has one, knows
// that all commands are running. If the server dies during a start the command
// may be running in a sandbox without being known.
func commandsStarted(t *testing.T, c *scene.Container) bool {
	t.Helper()
	record, err := shim.ReadRecord(runDir(c))
	if errors.Is(err, fault.NotFound) {
		return true
	}
	if err != nil {
		t.Fatal(err)
	}
	var client *shim.Client
	if err := c.Pod.World.Do(func() (err error) {
		client, err = record.Dial(t.Context())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for _, dir := range execDirs(c) {
		started, err := client.Started(t.Context(), shim.Process{ID: c.ID, Exec: strings.TrimPrefix(filepath.Base(dir), "exec-")})
		if err != nil && !errors.Is(err, fault.NotFound) {
			t.Fatal(err)
		}
		if !started {
			return false
		}
	}
	return true
}

// A command whose helper gets no processor for a while, as on an overloaded
// node, runs when it does. runsc's own patience is ten seconds, after which
// exec --detach silently ends with 128, and the command runs nevertheless.
func TestCommandWithAStalledHelper(t *testing.T) {
	eachOf(t, slices.DeleteFunc(wanted(), func(h string) bool { return h != gvisor }), func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		stalled := false
		for attempt := 0; !stalled && attempt < 200; attempt++ { // a helper may come and go unseen
			ctx, end := context.WithCancel(t.Context())
			caught := make(chan bool, 1)
			go func() { caught <- stallHelper(ctx, c.ID, 12*time.Second) }()
			r := c.ExecResult(t, "/probe", "echo", "out", ";", "exit", "6")
			end()
			if r.ExitCode != 6 || string(r.Stdout) != "out\n" {
				t.Errorf("code %d, %q, %q", r.ExitCode, r.Stdout, r.Stderr)
			}
			stalled = <-caught
		}
		if !stalled {
			t.Error("no helper could be stopped")
		}
	})
}

// stallHelper stops a command's helper for a while, unless ctx ends before one is seen.
func stallHelper(ctx context.Context, id string, pause time.Duration) bool {
	for ctx.Err() == nil {
		if helper := execHelper(id); helper > 1 && unix.Kill(helper, unix.SIGSTOP) == nil {
			time.Sleep(pause)
			return unix.Kill(helper, unix.SIGCONT) == nil
		}
	}
	return false
}

// execHelper returns the process on the node that stands for a command in a
// sandbox; 0: there is none yet.
func execHelper(id string) int {
	helpers := running(func(args []string) bool {
		return slices.Contains(args, "exec") && slices.Contains(args, id) && !slices.Contains(args, "--detach")
	})
	if len(helpers) == 0 {
		return 0
	}
	return helpers[0]
}

// running returns the processes of the machine with such arguments, the first
// of which is the program.
func running(such func(args []string) bool) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is well-formed
	for _, file := range files {
		line, _ := os.ReadFile(file) // it may have ended
		if such(strings.Split(strings.TrimRight(string(line), "\x00"), "\x00")) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file))) // a number, by the pattern
			pids = append(pids, pid)
		}
	}
	return pids
}

// answersNewServer waits until a container's monitor is known to the newly
// started server.
func answersNewServer(t *testing.T, c *scene.Container) {
	t.Helper()
	wait.For(t, "the monitor to answer the new server", func() bool {
		_, err := c.Pod.World.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"/probe", "facts"}})
		return err == nil
	})
}

// exitNoted waits until a container's monitor has recorded its exit.
func exitNoted(t *testing.T, c *scene.Container) {
	t.Helper()
	file := filepath.Join(c.Pod.World.StateRoot(), "containers", c.ID, "exit.json")
	wait.For(t, "the monitor to note the exit", func() bool { _, err := os.Stat(file); return err == nil })
}

// notReady waits until a pod whose sandbox has ended is not ready.
func notReady(t *testing.T, p *scene.Pod) {
	t.Helper()
	wait.For(t, "the pod to be not ready", func() bool { return p.Status(t).State == cri.PodSandboxState_SANDBOX_NOTREADY })
}

// processes returns a container's monitor and the pid that the runtime has
// reported to it.
func processes(t *testing.T, dir string) (monitor, container int) {
	t.Helper()
	var known struct{ Monitor, Container struct{ PID int } }
	if err := json.Unmarshal([]byte(scene.Read(t, filepath.Join(dir, "monitor.json"))), &known); err != nil {
		t.Fatal(err)
	}
	return known.Monitor.PID, known.Container.PID
}

func runDir(c *scene.Container) string {
	return filepath.Join(c.Pod.World.RunRoot(), "containers", c.ID)
}

func kill(t *testing.T, pid int) {
	t.Helper()
	if pid <= 1 {
		t.Fatalf("there is no process to kill: %d", pid)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// Without its monitor a container is ended with a reason; the others live.
func TestMonitorKilled(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		other := p.Start(t, "sleep")
		c := p.Start(t, "sleep")
		monitor, _ := processes(t, runDir(c))
		kill(t, monitor)
		s := c.Wait(t)
		if s.ExitCode != 137 || !strings.Contains(s.Message, "monitor was lost") {
			t.Errorf("code %d, %q", s.ExitCode, s.Message)
		}
		scene.Equal(t, "state of the other", other.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
		if len(other.Facts(t).Processes) != 2 {
			t.Error("the other has processes that are not its own")
		}
		c.Remove(t)
		p.Start(t, "sleep")
	})
}

// The process that the runtime has made is killed: the container's, or the
// sandbox's, with which all containers end.
func TestRuntimeKilled(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		c, other, created := p.Start(t, "sleep"), p.Start(t, "sleep"), p.Create(t, "sleep")
		_, pid := processes(t, runDir(c))
		kill(t, pid)
		dead := []*scene.Container{c}
		whole := sandboxed(handler) && handler != kataCLI // whose process is that of one container
		if whole {
			dead = append(dead, other)
		}
		if whole && handler != ofRunsc { // which reports no end of what never ran
			dead = append(dead, created)
		}
		for _, c := range dead {
			if s := c.Wait(t); s.ExitCode != 137 || s.Reason != "Error" {
				t.Errorf("code %d, %s", s.ExitCode, s.Reason)
			}
		}
		if whole {
			notReady(t, p)
			p.Stop(t)
			scene.Equal(t, "exit code of what never ran", created.Status(t).ExitCode, int32(137))
			return
		}
		scene.Equal(t, "state of the other", other.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	})
}

// The process that waits for a container is killed: another one waits, and
// reports the end. It is to receive events from shims, too; gVisor's ends when it
// cannot deliver one.
func TestWaiterKilled(t *testing.T) {
	eachOf(t, slices.DeleteFunc(wanted(), func(h string) bool { return h != gvisor && !tools.IsShim(h) || h == ofRunsc }), func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "await /end ; exit 8")
		monitor, _ := processes(t, runDir(c))
		killed := 0
		for range 3 {
			pid := 0
			wait.For(t, "somebody to wait for the container", func() bool { pid = waiter(t, monitor); return pid != 0 && pid != killed })
			kill(t, pid)
			killed = pid // it may be visible for a moment
		}
		scene.Equal(t, "state", c.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
		c.Last(t, "write /end now")
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(8))
	})
}

// waiter returns the live child of a monitor that runs the runtime's wait.
func waiter(t *testing.T, monitor int) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(monitor), "task", strconv.Itoa(monitor), "children"))
	if err != nil {
		t.Fatal(err)
	}
	tasks, _ := filepath.Glob(filepath.Join("/proc", strconv.Itoa(monitor), "task", "*", "children"))
	for _, task := range tasks {
		more, _ := os.ReadFile(task)
		text = append(append(text, ' '), more...)
	}
	for _, word := range strings.Fields(string(text)) {
		line, _ := os.ReadFile(filepath.Join("/proc", word, "cmdline"))
		if strings.Contains(string(line), "\x00wait\x00") {
			pid, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	return 0
}
