package cgroup

import (
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// directory is a cgroup in one hierarchy, whose files are read again and again.
// It is kept open in between, and so are the files that every reading reads: that
// saves half of what it takes (docs/decisions/0006-stats.md). It may be used by
// several goroutines at once.
type directory struct {
	path     string
	most     int  // descriptors of this number or a higher one are not kept
	keepFile bool // files, too

	mu    sync.RWMutex // held for reading while what follows is in use
	kept  *os.File     // opened with O_PATH; nil: not asked for yet, or not kept
	files map[string]int
	bare  bool // nothing is to be kept
}

// read reads a file of the cgroup, in one go. One that is read again and again is
// kept open.
func (d *directory) read(name string, buffer []byte, again bool) (int, error) {
	if n, known, err := d.readKept(name, buffer); known {
		return n, err
	}
	fd, err := d.open(name)
	if err != nil {
		return 0, err
	}
	n, err := pread(fd, buffer)
	if err != nil || !again || !d.keepOpen(name, fd) {
		_ = unix.Close(fd)
	}
	return n, err
}

// readKept knows nothing if the file is not open, or is of a cgroup that was
// removed: another one may have its name by now.
func (d *directory) readKept(name string, buffer []byte) (n int, known bool, err error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	fd, open := d.files[name]
	if !open {
		return 0, false, nil
	}
	n, err = pread(fd, buffer)
	return n, !errors.Is(err, unix.ENODEV), err
}

// keepOpen reports whether it takes the descriptor.
func (d *directory) keepOpen(name string, fd int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, another := d.files[name]; another || !d.keepFile || d.kept == nil || fd >= d.most {
		return false
	}
	if d.files == nil {
		d.files = map[string]int{}
	}
	d.files[name] = fd
	return true
}

func pread(fd int, buffer []byte) (n int, err error) {
	for {
		if n, err = unix.Pread(fd, buffer, 0); err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

// open opens a file of the cgroup for reading.
func (d *directory) open(name string) (int, error) {
	if fd, known, err := d.openKept(name); known {
		return fd, err
	}
	if d.keep() {
		if fd, known, err := d.openKept(name); known {
			return fd, err
		}
	}
	return unix.Open(d.path+"/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
}

// openKept knows nothing if the directory is not open, or is of a cgroup that
// was removed: another one may have its name by now.
func (d *directory) openKept(name string) (fd int, known bool, err error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.kept == nil {
		return -1, false, nil
	}
	at := int(d.kept.Fd())
	fd, err = unix.Openat(at, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT && unix.Faccessat(at, "cgroup.procs", unix.F_OK, 0) != nil {
		return -1, false, nil
	}
	return fd, true, err
}

// keep opens the directory anew. It reports whether it is kept.
func (d *directory) keep() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.drop()
	if d.bare {
		return false
	}
	fd, err := unix.Open(d.path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	d.kept = os.NewFile(uintptr(fd), d.path)
	if fd >= d.most {
		d.bare = true
		d.drop()
	}
	return !d.bare
}

func (d *directory) drop() {
	for _, fd := range d.files {
		_ = unix.Close(fd)
	}
	d.files = nil
	if d.kept != nil {
		_ = d.kept.Close()
		d.kept = nil
	}
}

// close is for good, also for a reading that comes later.
func (d *directory) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.bare = true
	d.drop()
}

// spareDescriptors is how many descriptors the process may have open before
// directories and files are no longer kept: the rest of its limit is for what it
// cannot do without.
func spareDescriptors() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return int(min(limit.Cur/4, 1<<20))
}
