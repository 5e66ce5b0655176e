package thread

import (
	"errors"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Not parallel: it counts the threads of the whole process.
func TestThreadEnds(t *testing.T) {
	threads := func() int {
		entries, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	const runs, slack = 100, 8 // the Go runtime starts some of its own
	before := threads()
	for range runs {
		if err := Run(func() error { return unix.Unshare(unix.CLONE_FS) }); err != nil {
			t.Fatal(err)
		}
	}
	deadline := time.Now().Add(time.Minute)
	for threads() > before+slack && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond) // a thread's end is not announced
	}
	if now := threads(); now > before+slack {
		t.Errorf("%d threads before, %d after", before, now)
	}
}

// The main goroutine begins on the main thread, and is held there until the
// tests start.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) {
	if unix.Gettid() != unix.Getpid() {
		panic("not on the main thread")
	}
	end := make(chan outcome, 1)
	run(func() error {
		if unix.Gettid() == unix.Getpid() {
			return errors.New("ran on the main thread")
		}
		return nil
	}, end)
	if out := <-end; out.err != nil || out.panic != nil {
		panic(out)
	}
	runtime.UnlockOSThread()
	os.Exit(m.Run())
}

func TestOutcome(t *testing.T) {
	t.Parallel()
	for range 100 { // some of them by way of the main thread
		told := errors.New("told")
		if err := Run(func() error { return told }); err != told {
			t.Errorf("error %v", err)
		}
		if err := Run(func() error { (&testing.T{}).SkipNow(); return nil }); err == nil {
			t.Error("a function that did not return has no error")
		}
		func() {
			defer func() {
				if p := recover(); p != "boom" {
					t.Errorf("recovered %v", p)
				}
			}()
			Run(func() error { panic("boom") })
		}()
	}
}
