package oci

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
	"testing"

	"github.com/crius-run/crius/test/kit/wait"
)

// traced returns a process that has stopped. Its tracer does what await does, which returns at the end of both.
func traced(t *testing.T, await func(end *os.File, alsoEnd <-chan struct{})) (pid int) {
	t.Helper()
	began, end, over := make(chan int), make(chan struct{}), make(chan error, 1)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		runtime.LockOSThread() // which is the tracer
		cmd := exec.Command("sleep", "infinity")
		cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
		err := cmd.Start()
		var status syscall.WaitStatus
		if err == nil {
			_, err = syscall.Wait4(cmd.Process.Pid, &status, 0, nil)
		}
		if err != nil || !status.Stopped() {
			over <- errors.Join(err, errors.New("sleep cannot be traced"))
			close(began)
			return
		}
		began <- cmd.Process.Pid
		await(r, end)
		err = cmd.Process.Kill()
		_ = cmd.Wait() // killed
		over <- err
	}()
	pid = <-began
	t.Cleanup(func() {
		close(end)
		_ = w.Close()
		if err := errors.Join(<-over, r.Close()); err != nil {
			t.Error(err)
		}
	})
	if pid == 0 {
		t.FailNow()
	}
	return pid
}

// A thread that has stopped is found if its tracer waits for a futex, and not if the tracer does anything else.
func TestStuckThread(t *testing.T) {
	t.Parallel()
	stuck := traced(t, func(_ *os.File, end <-chan struct{}) { <-end }) // by a futex, since its thread is locked
	fine := traced(t, func(end *os.File, _ <-chan struct{}) { _, _ = syscall.Read(int(end.Fd()), make([]byte, 1)) })
	wait.For(t, "only the stuck thread to be found", func() bool { return stuckThread([]int{os.Getpid(), fine, stuck}) == stuck })
}

// Only the same thread in some looks in a row is stuck for sure.
func TestStuckWatch(t *testing.T) {
	t.Parallel()
	enough := slices.Repeat([]int{7}, stuckLooks)
	few := enough[1:]
	for name, c := range map[string]struct {
		found []int
		sure  bool
	}{
		"never":     {make([]int, 2*stuckLooks), false},
		"at once":   {enough, true},
		"too short": {slices.Concat(few, []int{0}, few), false},
		"others":    {slices.Repeat([]int{7, 8}, stuckLooks), false},
		"later":     {slices.Concat([]int{0, 0, 9}, enough), true},
	} {
		i := 0
		watch := stuckWatch{find: func() int { i++; return c.found[i-1] }}
		sure := false
		for range c.found {
			sure = watch.isSure()
		}
		if sure != c.sure {
			t.Errorf("%s: %v", name, sure)
		}
	}
}
