// Package eintr repeats system calls that a signal has interrupted.
//
// Go does so for its own files and connections, and installs its handlers with
// SA_RESTART, so that the kernel itself repeats most of the others. The rest
// still fails with EINTR (signal(7)), and must be called through Retry: poll,
// epoll and sleeps, socket calls under SO_RCVTIMEO or SO_SNDTIMEO, and calls
// that the kernel aborts half-way, such as fallocate and writes to cgroup
// files. A Go process gets a signal whenever a child ends or a goroutine is
// preempted.
package eintr

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Retry calls call until it returns anything but EINTR. A call with a timeout
// must recompute the rest of it each time.
func Retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
