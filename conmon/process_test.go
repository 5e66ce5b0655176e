package conmon_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

func TestOpenPIDNamespace(t *testing.T) {
	t.Parallel()
	self, err := wire.Find(os.Getpid())
	must(err)
	file, err := conmon.OpenPIDNamespace(self)
	must(err)
	defer file.Close()
	own, err := os.Stat("/proc/self/ns/pid")
	must(err)
	opened, err := file.Stat()
	must(err)
	if !os.SameFile(own, opened) {
		t.Errorf("%s is not this process's PID namespace", file.Name())
	}

	earlier := conmon.Process{PID: self.PID, StartTime: self.StartTime - 1}
	for _, p := range []conmon.Process{earlier, {PID: 1 << 30}, {}} {
		if _, err := conmon.OpenPIDNamespace(p); !errors.Is(err, fault.Precondition) {
			t.Errorf("of %+v, which has ended: %v, want fault.Precondition", p, err)
		}
	}
}

// Await ends with the process, even if that is a zombie, or with its context.
func TestAwait(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("cat")
	stdin, err := cmd.StdinPipe()
	must(err)
	must(cmd.Start())
	process, err := wire.Find(cmd.Process.Pid)
	must(err)

	ctx, cancel := context.WithCancel(t.Context())
	waits := make(chan error, 1)
	go func() { waits <- conmon.Await(ctx, process) }()
	cancel()
	if err := <-waits; !errors.Is(err, context.Canceled) {
		t.Errorf("of a process that lives: %v", err)
	}
	go func() { waits <- conmon.Await(t.Context(), process) }()
	must(stdin.Close())
	if err := <-waits; err != nil {
		t.Errorf("of a process that ends: %v", err)
	}
	if conmon.Alive(process) {
		t.Error("Await has returned, and the process is alive")
	}
	if err := conmon.Await(t.Context(), process); err != nil {
		t.Errorf("of a zombie: %v", err)
	}
	must(cmd.Wait())
	if err := conmon.Await(t.Context(), process); err != nil {
		t.Errorf("of a process that has been reaped: %v", err)
	}
}

// scarceRole makes this program call withoutDescriptors.
const scarceRole = "CONMON_TEST_SCARCE"

// A process is not reported as dead, or as signalled, because descriptors are
// used up.
func TestProcessWithoutDescriptors(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), scarceRole+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func withoutDescriptors() error {
	self, err := wire.Find(os.Getpid())
	if err != nil {
		return err
	}
	for last := -1; ; {
		fd, err := unix.Dup(0)
		if err != nil {
			_ = unix.Close(last) // which leaves one
			break
		}
		last = fd
	}
	if !conmon.Alive(self) {
		return errors.New("a living process is said to be dead")
	}
	if err := conmon.Signal(self, 0); !errors.Is(err, unix.EMFILE) {
		return fmt.Errorf("signal: %w", err)
	}
	return nil
}

// The number of an ended process may be that of another process's thread.
func TestNumberOfAThread(t *testing.T) {
	t.Parallel()
	ids, end := make(chan int), make(chan struct{})
	defer close(end)
	for range 2 { // one of them is not the first thread of the process
		go func() {
			runtime.LockOSThread()
			ids <- unix.Gettid()
			<-end
		}()
	}
	for range 2 {
		if p := (conmon.Process{PID: <-ids, StartTime: 1}); conmon.Alive(p) || conmon.Signal(p, 0) != nil {
			t.Errorf("thread %d: alive %t, signal %v", p.PID, conmon.Alive(p), conmon.Signal(p, 0))
		}
	}
}
