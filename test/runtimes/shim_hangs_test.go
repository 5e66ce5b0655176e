package runtimes

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// A command whose shim does not answer delays its caller no longer than its
// time limit. When the shim is back nothing is left of the command.
func TestExecOfHangingShim(t *testing.T) {
	eachShim(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		shim, _ := shimOf(t, runDir(c))
		if err := unix.Kill(shim, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		defer unix.Kill(shim, unix.SIGCONT)
		_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"/probe", "sleep"}, Timeout: 1})
		scene.WantCode(t, err, codes.DeadlineExceeded)
		// The directory exists until the shim has been asked to take the command
		// back.
		if len(execDirs(c)) != 1 {
			t.Error("the caller has been kept waiting until the command was taken back")
		}
		if err := unix.Kill(shim, unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		alone(t, c)
		wait.For(t, "the directory of the command to go", func() bool { return len(execDirs(c)) == 0 })
	})
}

// If a server is killed while its shim starts a command the start is aborted,
// but not a process that the runtime has started by then: the shim does not
// know it. The next server ends it, even if the shim does not answer while that
// server starts.
func TestCommandThatItsShimDoesNotKnow(t *testing.T) {
	t.Parallel()
	t.Run("shim answers", func(t *testing.T) {
		t.Parallel()
		endsUnknownCommand(t, func(w *scene.World, _ *scene.Container) error { return w.Crash(t.Context()) })
	})
	t.Run("shim hangs", func(t *testing.T) {
		t.Parallel()
		endsUnknownCommand(t, func(w *scene.World, c *scene.Container) error {
			shim, _ := shimOf(t, runDir(c))
			if err := errors.Join(w.Kill(), unix.Kill(shim, unix.SIGSTOP), w.Start(t.Context())); err != nil {
				return err
			}
			logs(t, w, "cannot kill exec processes left by a previous server, retrying")
			return unix.Kill(shim, unix.SIGCONT)
		})
	})
}

func endsUnknownCommand(t *testing.T, crash func(*scene.World, *scene.Container) error) {
	t.Helper()
	path, err := exec.LookPath("containerd-shim-runc-v2")
	if err != nil {
		t.Fatal(err)
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	holding, hold := filepath.Join(dir, "runc"), filepath.Join(dir, "hold")
	scene.WriteProgram(t, holding, fmt.Appendf(nil, `#!/bin/sh
case " $* " in
*" exec "*) %[1]s "$@" || exit; [ ! -e %[2]s ] || exec sleep 600;;
*) exec %[1]s "$@";;
esac
`, runc, hold))
	w := scene.Private(t, node.Options{Config: fmt.Sprintf("[runtime.handlers.held]\ntype = \"shim\"\npath = %q\noptions = [%q]\n", path, "--BinaryName="+holding)})
	c := w.Pod(t, "held").Start(t, "fork 1 sleep ; sleep")
	s := session(t, w, &cri.ExecRequest{ContainerId: c.ID, Cmd: []string{"/probe", "echo", "here", ";", "sleep"}, Stdin: true, Stdout: true})
	shows(t, s, "here")
	before := len(c.Facts(t).Processes)
	scene.Write(t, hold, "")
	ended := make(chan error, 1)
	go func() {
		_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"/probe", "write", "/tmp/runs", "yes", ";", "sleep"}})
		ended <- err
	}()
	_, pid := processes(t, runDir(c))
	wait.For(t, "the command to run", func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/%d/root/tmp/runs", pid))
		return err == nil
	})
	if err := crash(w, c); err != nil {
		t.Fatal(err)
	}
	scene.WantCode(t, <-ended, codes.Unavailable)
	if err := os.Remove(hold); err != nil {
		t.Fatal(err)
	}
	answersNewServer(t, c)
	var all map[int]string
	if !wait.Until(t.Context(), func() bool { all = c.Facts(t).Processes; return len(all) == before }) {
		t.Errorf("processes: %v, want %d", all, before)
	}
}

// execDirs returns the directories of a container's commands.
func execDirs(c *scene.Container) []string {
	dirs, _ := filepath.Glob(filepath.Join(runDir(c), "exec-*")) // the pattern is well-formed
	return dirs
}

// The client of a forwarded port leaves while the container keeps the
// connection: no process stays in the sandbox for that.
func TestForwarderLeaves(t *testing.T) {
	eachKata(t, func(t *testing.T, w *scene.World) {
		tunnel, forwarders := forwarded(t, w.Pod(t, kata), 7019)
		_ = tunnel.Close()
		vanishes(t, forwarders...)
	})
}

// Nor does one stay if the server is killed: the next one ends it.
func TestForwarderOfAKilledServer(t *testing.T) {
	shims := slices.DeleteFunc(wanted(), func(h string) bool { return h != kata && h != kata1 })
	eachPrivateOf(t, shims, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		_, forwarders := forwarded(t, p, 7020)
		if err := w.Crash(t.Context()); err != nil {
			t.Fatal(err)
		}
		vanishes(t, forwarders...)
		_, again := forwarded(t, p, 7021)
		if len(again) != 1 {
			t.Errorf("forwarders after a restart: %v", again)
		}
	})
}

// To a session a killed server is like a client that has left: its input ends, or its terminal hangs up, and
// nothing is left of it when the command has ended.
func TestSessionsOfAKilledServer(t *testing.T) {
	eachPrivateOf(t, shims(), func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		for _, tty := range []bool{false, true} {
			s := session(t, w, &cri.ExecRequest{
				ContainerId: c.ID, Cmd: []string{"/probe", "echo", "here", ";", "until", "enough"},
				Stdin: true, Stdout: true, Stderr: !tty, Tty: tty,
			})
			shows(t, s, "here")
		}
		sessions := func() int {
			dirs, _ := filepath.Glob(filepath.Join(runDir(c), "session-*")) // the pattern is well-formed
			return len(dirs)
		}
		if n := sessions(); n != 2 {
			t.Errorf("%d sessions", n)
		}
		if err := w.Crash(t.Context()); err != nil {
			t.Fatal(err)
		}
		wait.For(t, "the sessions to end", func() bool { return sessions() == 0 })
		scene.Equal(t, "command", c.Exec(t, "echo again"), "again\n")
	})
}

// forwarded connects to a port of a pod, on which a container writes all the time, and returns the
// processes in the sandbox that do it.
func forwarded(t *testing.T, p *scene.Pod, port int) (tunnel *kubelet.Tunnel, forwarders []int) {
	t.Helper()
	p.Start(t, fmt.Sprintf("tcp 127.0.0.1:%d flood ; echo all-set ; sleep", port)).Says(t, "all-set")
	resp, err := p.World.Runtime().PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: p.ID})
	if err != nil {
		t.Fatal(err)
	}
	tunnel, err = kubelet.Streams{Within: p.World.Do}.Tunnel(t.Context(), resp.Url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tunnel.Close() })
	wire, err := tunnel.Connect(port)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(wire, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	forwarders = called(t, p.ID, "\x00forward\x00"+strconv.Itoa(port)+"\x00")
	if len(forwarders) != 1 {
		t.Fatalf("forwarders of the port: %v", forwarders)
	}
	return tunnel, forwarders
}

// called returns the processes of a pod whose command lines contain words.
func called(t *testing.T, pod, words string) []int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, file := range files {
		line, _ := os.ReadFile(file)
		cgroups, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "cgroup"))
		if strings.Contains(string(line), words) && strings.Contains(string(cgroups), pod) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			if err != nil {
				t.Fatal(err)
			}
			pids = append(pids, pid)
		}
	}
	return pids
}

// A shim that was told to end and only stops listening is killed.
func TestShimThatIgnoresShutdownIsKilled(t *testing.T) {
	eachKata(t, func(t *testing.T, w *scene.World) {
		p, err := kataPod(t, w, map[string]string{hangsAt: "end"})
		if err != nil {
			t.Fatal(err)
		}
		shim, _ := shimOf(t, runDir(p.Start(t, "sleep")))
		p.Remove(t)
		vanishes(t, shim)
	})
}
