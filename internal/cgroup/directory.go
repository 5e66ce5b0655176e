package cgroup

import (
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// keptOfPod is how many descriptors the meters of a pod keep, for its own
// cgroup and its containers.
const keptOfPod = 4

// directory is a cgroup in one hierarchy whose files are read repeatedly. It
// may be kept open in between, which makes that cheaper
// (docs/decisions/0006-stats.md). It may be used by several goroutines at once.
type directory struct {
	path string
	most int           // a descriptor of this number or a higher one is not kept
	left *atomic.Int32 // further descriptors that the pod's meters may keep; nil: this one keeps none

	mu   sync.RWMutex // held for reading while the fields below are in use
	kept *os.File     // opened with O_PATH; nil: not needed yet, or not kept
	bare bool         // nothing may be kept
}

// read reads a file of the cgroup in one call.
func (d *directory) read(name string, buffer []byte) (int, error) {
	fd, err := d.open(name)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return pread(fd, buffer)
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

// openKept returns known = false if the directory is not open, or belongs to a
// removed cgroup: a new one may have its name by now.
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

// keep opens the directory again. It reports whether the directory is kept.
func (d *directory) keep() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.drop()
	if d.bare || d.left == nil {
		return false
	}
	if d.left.Add(-1) < 0 {
		d.left.Add(1)
		return false
	}
	fd, err := unix.Open(d.path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		d.left.Add(1)
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
		d.left.Add(1)
	}
}

// close is final: later readings do not keep the directory open again.
func (d *directory) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.bare = true
	d.drop()
}

// spareDescriptors returns how many descriptors the process may have open
// before directories are no longer kept: the rest of its limit is reserved for
// indispensable files.
func spareDescriptors() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return int(min(limit.Cur/4, 1<<20))
}
