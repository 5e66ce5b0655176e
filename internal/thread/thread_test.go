package thread

import (
	"errors"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/wait"
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
	wait.For(t, "the threads to end", func() bool { return threads() <= before+slack })
}

// The main goroutine begins on the main thread, and is held there until the
// tests start.
func init() { runtime.LockOSThread() } //nolint:gochecknoinits // TestMain is too late

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
	for range 100 { // some of them start on the main thread
		told := errors.New("told")
		if err := Run(func() error { return told }); !errors.Is(err, told) {
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
