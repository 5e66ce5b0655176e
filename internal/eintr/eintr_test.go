package eintr

import (
	"errors"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

func TestRetryRepeatsInterruptedCallsOnly(t *testing.T) {
	for _, last := range []error{nil, unix.EAGAIN, errors.New("another")} {
		calls := 0
		err := Retry(func() error {
			if calls++; calls < 3 {
				return unix.EINTR
			}
			return last
		})
		if !errors.Is(err, last) || calls != 3 {
			t.Errorf("%d calls, %v, want 3, %v", calls, err, last)
		}
	}
}

// TestRetryOfRealSignals waits in poll(2), which is never restarted, while
// signals arrive.
func TestRetryOfRealSignals(t *testing.T) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(p[0])
	defer unix.Close(p[1])
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	calling, interrupted := make(chan int), make(chan struct{})
	go func() {
		thread := <-calling
		for {
			select {
			case <-interrupted:
				_, _ = unix.Write(p[1], []byte("x"))
				return
			default:
				_ = unix.Tgkill(unix.Getpid(), thread, unix.SIGURG) // as the scheduler does
			}
		}
	}()
	calling <- unix.Gettid()
	n, times := 0, 0
	err := Retry(func() (err error) {
		n, err = unix.Poll([]unix.PollFd{{Fd: int32(p[0]), Events: unix.POLLIN}}, -1)
		if err == unix.EINTR {
			if times++; times == 3 {
				close(interrupted)
			}
		}
		return err
	})
	if n != 1 || err != nil {
		t.Errorf("poll: %d, %v", n, err)
	}
}
