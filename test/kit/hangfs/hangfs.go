// Package hangfs mounts a file system that stops answering, like that of a dead
// file server: a process that accesses it sleeps uninterruptibly, in state D,
// and not even SIGKILL ends it before Release.
//
// It is a small FUSE server. If the process that serves it ends, for whatever
// reason, the kernel releases all waiting processes.
package hangfs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// FS is one mount. Its root is an empty directory; a look-up of any name in it
// blocks.
type FS struct {
	Dir string // where it is mounted

	device *os.File

	mu      sync.Mutex
	dead    bool
	waiting int
}

// Mount mounts a file system at dir, whose root can be looked at.
func Mount(dir string) (*FS, error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/fuse: %w", err)
	}
	options := fmt.Sprintf("fd=%d,rootmode=40755,user_id=0,group_id=0,allow_other", fd)
	if err := unix.Mount("hangfs", dir, "fuse.hangfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return nil, errors.Join(fmt.Errorf("mount FUSE at %s: %w", dir, err), unix.Close(fd))
	}
	f := &FS{Dir: dir, device: os.NewFile(uintptr(fd), "/dev/fuse")}
	go f.serve()
	return f, nil
}

// Hang makes accesses to the root block, too.
func (f *FS) Hang() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dead = true
}

// Waiting returns how many requests wait for ever.
func (f *FS) Waiting() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.waiting
}

// Release ends all waiting requests, with an error, and unmounts. It may be
// called again.
func (f *FS) Release() error {
	err := f.device.Close() // the kernel aborts waiting requests
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return errors.Join(err, unix.Unmount(f.Dir, unix.MNT_DETACH))
}

// Requests of linux/fuse.h.
const (
	opForget      = 2
	opGetattr     = 3
	opStatfs      = 17
	opInit        = 26
	opOpendir     = 27
	opAccess      = 34
	opInterrupt   = 36
	opBatchForget = 42

	parallelLookups = 1 << 18 // FUSE_PARALLEL_DIROPS: a waiting process does not hold the directory
)

func (f *FS) serve() {
	request := make([]byte, 1<<17)
	for {
		n, err := f.device.Read(request)
		if err != nil {
			return // released
		}
		if n >= 40 {
			f.answer(request[:n])
		}
	}
}

func (f *FS) answer(request []byte) {
	operation, unique := binary.NativeEndian.Uint32(request[4:]), binary.NativeEndian.Uint64(request[8:])
	f.mu.Lock()
	defer f.mu.Unlock()
	body, known := answers()[operation]
	switch {
	case operation == opForget, operation == opBatchForget, operation == opInterrupt: // these need no answer
	case operation != opInit && (f.dead || !known):
		f.waiting++
	default:
		reply := binary.NativeEndian.AppendUint32(nil, uint32(16+len(body)))
		reply = binary.NativeEndian.AppendUint32(reply, 0)
		reply = binary.NativeEndian.AppendUint64(reply, unique)
		_, _ = f.device.Write(append(reply, body...)) // the caller may be gone
	}
}

// answers returns the bodies of the answers.
func answers() map[uint32][]byte {
	words := func(n int, at map[int]uint32) []byte {
		body := make([]byte, 4*n)
		for i, word := range at {
			binary.NativeEndian.PutUint32(body[4*i:], word)
		}
		return body
	}
	return map[uint32][]byte{
		opInit: words(16, map[int]uint32{0: 7, 1: 31, 3: parallelLookups, 5: 4096}),
		// Valid for no time, so that each look-up is a request.
		opGetattr: words(26, map[int]uint32{4: 1, 19: unix.S_IFDIR | 0o755, 20: 2, 24: 4096}),
		opStatfs:  words(20, map[int]uint32{10: 4096, 11: 255}),
		opOpendir: words(4, nil),
		opAccess:  nil,
	}
}
