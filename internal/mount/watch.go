package mount

import "golang.org/x/sys/unix"

// Watch reports changes of the mount table that this process sees. The zero value is ready for
// use, by one goroutine at a time.
type Watch struct {
	open bool
	fd   int // not an os.File: the Go runtime would poll it, and the kernel reports a change once
}

// Changed reports whether anything was mounted or unmounted since the last call. It is true the
// first time, and whenever the kernel cannot be asked.
func (w *Watch) Changed() bool {
	if !w.open {
		fd, err := unix.Open(self, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		w.fd, w.open = fd, err == nil
		return true
	}
	table := []unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLPRI}}
	n, err := unix.Poll(table, 0)
	return n > 0 || err != nil
}

// Close ends the watch. It is idempotent.
func (w *Watch) Close() {
	if w.open {
		_ = unix.Close(w.fd)
		w.open = false
	}
}
