package cgroup

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// directory is a cgroup in one hierarchy, whose files are read again and again.
// It is kept open in between, which saves a third of what reading a file takes
// (docs/decisions/0006-stats.md), and may be used by several goroutines at once.
type directory struct {
	path string
	most int // its descriptor is not kept if it has this number or a higher one

	mu   sync.RWMutex // held for reading while kept is in use
	kept *os.File     // opened with O_PATH; nil: not asked for yet, or not kept
	bare bool         // not to be kept
}

// open opens a file of the cgroup for reading.
func (d *directory) open(name string) (int, error) {
	if fd, err, known := d.openKept(name); known {
		return fd, err
	}
	if d.keep() {
		if fd, err, known := d.openKept(name); known {
			return fd, err
		}
	}
	return unix.Open(d.path+"/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
}

// openKept knows nothing if the directory is not open, or is of a cgroup that
// was removed: another one may have its name by now.
func (d *directory) openKept(name string) (fd int, err error, known bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.kept == nil {
		return -1, nil, false
	}
	at := int(d.kept.Fd())
	fd, err = unix.Openat(at, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT && unix.Faccessat(at, "cgroup.procs", unix.F_OK, 0) != nil {
		return -1, nil, false
	}
	return fd, err, true
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
// directories are no longer kept: the rest of its limit is for what it cannot do
// without.
func spareDescriptors() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return int(min(limit.Cur/4, 1<<20))
}
