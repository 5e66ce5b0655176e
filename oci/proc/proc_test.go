package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/wait"
)

// TestReaper: orphans become children of this process; those for which
// something waits are left alone, the others are reaped after two scans.
func TestReaper(t *testing.T) {
	reaper, err := NewReaper()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	died := make(chan os.Signal, 1)
	died <- unix.SIGCHLD
	done := make(chan struct{})
	go func() {
		defer close(done)
		reaper.Run(ctx, time.Second, died) // in less time, a busy machine may not have started to wait for the shell
	}()
	// The shell's child outlives it, becomes a child of this process and dies.
	out, err := exec.Command("/bin/sh", "-c", "(sleep 0.05) >/dev/null & echo $!").Output()
	if err != nil {
		t.Fatal(err)
	}
	var orphan int
	fmt.Sscan(string(out), &orphan)
	wait.For(t, "the orphan to be reaped", func() bool {
		select { // by accident of scheduling a death may be signalled only once
		case died <- unix.SIGCHLD:
		default:
		}
		return unix.Kill(orphan, 0) != nil
	})
	cancel()
	<-done
}

// A runtime that is killed in the middle of an exec leaves a copy of itself in the container's PID namespace,
// for which the container's init would wait.
func TestReaperTakesCopiesOfARuntimeAtOnce(t *testing.T) {
	reaper, err := NewReaper()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	died := make(chan os.Signal, 1)
	signal.Notify(died, unix.SIGCHLD)
	defer signal.Stop(died)
	done := make(chan struct{})
	go func() {
		defer close(done)
		reaper.Run(ctx, 10*wait.Limit, died)
	}()
	init, copied := copyInNamespace(t)
	wait.For(t, "the copy to be reaped", func() bool { return unix.Kill(copied, 0) == unix.ESRCH })
	_ = unix.Kill(init, unix.SIGKILL)
	wait.For(t, "the init to be reaped", func() bool { return unix.Kill(init, 0) == unix.ESRCH })
	cancel()
	<-done
}

// copyInNamespace forks two processes into a PID namespace, which become children of this process: its
// init, and a copy of a shell that dies without executing anything.
func copyInNamespace(t *testing.T) (init, copied int) {
	t.Helper()
	out, err := exec.Command("unshare", "--pid", "sh", "-c", "(sleep 1000; :) >/dev/null 2>&1 & echo $!; (sleep 0.1; exit 0) >/dev/null 2>&1 & echo $!").Output()
	if err != nil {
		t.Fatal(err)
	}
	fmt.Sscan(string(out), &init, &copied)
	t.Cleanup(func() { _ = unix.Kill(init, unix.SIGKILL) })
	return init, copied
}

// A command that dies before it is executed is a copy of its runtime, too. It is left to whoever waits for
// it, or has started the runtime and does not know the command yet.
func TestReaperLeavesClaimedProcesses(t *testing.T) {
	if _, err := NewReaper(); err != nil {
		t.Fatal(err)
	}
	known := Starting()
	init, command := copyInNamespace(t)
	wait.For(t, "the command to die", func() bool { return isZombie(command) })
	zombies := unstartedZombies{}
	left := func(by string) {
		t.Helper()
		if zombies.reap(t.Context()); !isZombie(command) {
			t.Fatalf("the command was taken from %s", by)
		}
	}
	left("a runtime that is starting it")
	reaped := Claim(command)
	known()
	left("its owner")
	reaped()
	later := Starting()
	if zombies.reap(t.Context()); unix.Kill(command, 0) == nil || len(zombies) > 0 {
		t.Errorf("the command was not reaped, %v is left", zombies)
	}
	later()
	_ = unix.Kill(init, unix.SIGKILL)
	wait.For(t, "the init to be reaped", func() bool {
		zombies.reap(t.Context())
		return unix.Kill(init, 0) == unix.ESRCH
	})
}

// A process may have the pid of another that has been reaped and is still claimed.
func TestClaimOutlivesTheOneBefore(t *testing.T) {
	const pid = -2 // no process has it
	first, second := Claim(pid), Claim(pid)
	first()
	if last := children.lastStart(); !children.mayClaim(pid, last) {
		t.Error("the claim to the second process ended with that to the first")
	}
	second()
	if _, ok := children.pids[pid]; ok {
		t.Error("a claim stays")
	}
}

func TestKillTree(t *testing.T) {
	cmd := exec.Command("/bin/sh", "-c", "sh -c 'sleep 1000 & sleep 1000' & sleep 1000 & echo ready; wait")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	tree := []int{cmd.Process.Pid}
	wait.For(t, "all processes of the tree", func() bool {
		tree = tree[:1]
		for i := 0; i < len(tree); i++ {
			tree = append(tree, Children(tree[i])...)
		}
		return len(tree) >= 5
	})
	if KillTree(cmd.Process.Pid, func(int) bool { return false }) || !alive(cmd.Process.Pid) {
		t.Error("a process that is not meant was killed")
	}
	if !KillTree(cmd.Process.Pid, IsOwnChild) {
		t.Error("nothing was killed")
	}
	_ = cmd.Wait()
	for _, pid := range tree {
		wait.For(t, "a process of the tree to be dead", func() bool { return !alive(pid) })
	}
}

func TestExiting(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("sleep", "1h")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	if Exiting(pid) {
		t.Error("a process that sleeps is exiting")
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the process to exit", func() bool { return Exiting(pid) }) // a zombie
	_ = cmd.Wait()
	if !Exiting(pid) {
		t.Error("a process that is gone is not exiting")
	}
}

// alive reports whether pid runs; a zombie does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !bytes.Contains(stat, []byte(") Z "))
}

// helperOf is a process with the arguments of a sandbox's helper, in the cgroup
// of the sandbox with that id. It ends when its standard input does.
func helperOf(t *testing.T, sandbox string) (*exec.Cmd, io.Closer) {
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
		if err := errors.Join(cgroup.Remove(context.Background(), top), owned.Release()); err != nil {
			t.Error(err)
		}
	})
	cmd := exec.Command("sh", "-c", "read x; :", "gofer", container) // the shell would exec the last command
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
	// Even when started, it may not have its arguments yet. And it may be the
	// child of the thread that started it, which ends soon.
	wait.For(t, "the helper to be a child with arguments", func() bool {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", cmd.Process.Pid))
		children, _ := os.ReadFile("/proc/self/task/" + strconv.Itoa(os.Getpid()) + "/children")
		return bytes.Contains(line, []byte("\x00gofer\x00")) && slices.Contains(strings.Fields(string(children)), strconv.Itoa(cmd.Process.Pid))
	})
	return cmd, stdin
}

var container, sandbox = strings.Repeat("a", 64), strings.Repeat("b", 64)

// A process with the arguments of a sandbox's helper is a helper only in the
// sandbox's cgroup: elsewhere it is a command in a container, for which other
// code waits.
func TestHelpersAreKnownByTheirCgroup(t *testing.T) {
	helper, _ := helperOf(t, sandbox)
	command, _ := helperOf(t, strings.Repeat("c", 64))
	reap := ReapHelpers("gofer", sandbox, container)
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

// TestReapHelpersDespiteSignals interrupts the wait for a helper's end: the
// wait continues until the helper has ended or the time is up.
func TestReapHelpersDespiteSignals(t *testing.T) {
	helper, stdin := helperOf(t, sandbox)
	reap := ReapHelpers("gofer", sandbox, container)
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
