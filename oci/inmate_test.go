package oci

import (
	"errors"
	"io"
	"os/exec"
	"path"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/testkit/claim"
)

// helperOf is a process with the arguments of a sandbox's helper, in the cgroup of
// the sandbox with that id. It ends when its standard input does.
func helperOf(t *testing.T, ref Ref, sandbox string) (*exec.Cmd, io.Closer) {
	t.Helper()
	own, err := cgroup.Own()
	if err != nil {
		t.Fatal(err)
	}
	owned, err := claim.New()
	if err != nil {
		t.Fatal(err)
	}
	top := path.Join(own, owned.ID)
	t.Cleanup(func() {
		if err := errors.Join(cgroup.Remove(top), owned.Release()); err != nil {
			t.Error(err)
		}
	})
	cmd := exec.Command("sh", "-c", "read x; :", "gofer", ref.ID) // the last command is no exec
	stdin, err := cmd.StdinPipe()
	if err == nil {
		err = cgroup.Start(path.Join(top, "crius-"+sandbox), func(attr *syscall.SysProcAttr) error {
			cmd.SysProcAttr = attr
			return cmd.Start()
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		_ = cmd.Wait() // it may have been reaped
	})
	return cmd, stdin
}

var sandboxed = Ref{ID: strings.Repeat("a", 64), Sandbox: strings.Repeat("b", 64)}

// Who has the arguments of a sandbox's helper is one only in the sandbox's
// cgroup: elsewhere it is a command in a container, which somebody else waits for.
func TestHelpersAreKnownByTheirCgroup(t *testing.T) {
	helper, _ := helperOf(t, sandboxed, sandboxed.Sandbox)
	command, _ := helperOf(t, sandboxed, strings.Repeat("c", 64))
	reap := reapHelpers("gofer", sandboxed)
	for _, cmd := range []*exec.Cmd{helper, command} {
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
			t.Fatal(err)
		}
	}
	reap()
	if err := helper.Wait(); !errors.Is(err, syscall.ECHILD) {
		t.Errorf("the helper was not reaped: %v", err)
	}
	if err := command.Wait(); errors.Is(err, syscall.ECHILD) {
		t.Errorf("the command was reaped: %v", err)
	}
}

// TestReapHelpersDespiteSignals interrupts the wait for a helper's end: it goes
// on until the helper has ended or the patience is over.
func TestReapHelpersDespiteSignals(t *testing.T) {
	helper, stdin := helperOf(t, sandboxed, sandboxed.Sandbox)
	reap := reapHelpers("gofer", sandboxed)
	thread, returned := make(chan int), make(chan struct{})
	began := time.Now()
	go func() {
		defer close(returned)
		runtime.LockOSThread()
		thread <- unix.Gettid()
		reap()
	}()
	id := <-thread
	for range 10_000 {
		_ = unix.Tgkill(unix.Getpid(), id, unix.SIGURG) // as Go's scheduler does; no such thread: it has returned
	}
	stdin.Close()
	<-returned
	patient := time.Since(began) >= time.Second
	if got, err := unix.Wait4(helper.Process.Pid, nil, unix.WNOHANG, nil); err != unix.ECHILD && !patient {
		t.Errorf("the helper was not reaped: wait: %d, %v", got, err)
	}
}
