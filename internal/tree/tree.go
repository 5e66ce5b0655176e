// Package tree measures and removes directory trees that a hostile container
// may have made: however deep and wide they are, it keeps little in memory and
// few files open.
package tree

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// Usage adds up directory trees. It works by descriptors, because a container
// may nest directories deeper than a path can be long, and hide files there.
// However deep and wide the trees are, Usage has no more than two directories
// open at a time, and keeps maxNames names and a few words for each of at most
// maxDepth levels. It finds a directory that is moved meanwhile by its file
// handle (open_by_handle_at(2)).
type Usage struct {
	Bytes, Inodes uint64      // occupied; a file with several links counts once
	Stop          func() bool // is called now and then to ask whether to end with ErrStopped; nil: never

	linked map[inode]bool
	shared float64 // inodes not all of whose links were counted
	buffer []byte
	deeper bool // there are more than maxDepth levels
}

// Bounds on what a walk keeps: levels (the kernel also keeps some kilobytes for
// each while a lower one is open), names of directories still to be visited, in
// all levels, and files with several links.
const (
	maxDepth  = 16 << 10
	maxNames  = 4096
	maxBatch  = 1024 // names of one directory
	maxLinked = 100_000
)

type inode struct{ dev, ino uint64 }

var (
	// ErrStopped means that Stop requested the end.
	ErrStopped = errors.New("stopped measuring")

	errMoved = errors.New("a directory was moved while it was measured")
	errDeep  = fmt.Errorf("directories are nested in more than %d levels, below which nothing was counted", maxDepth)
)

// level is a directory on the way down.
type level struct {
	self inode
	// handle opens the directory wherever it is; empty if its file system has
	// none.
	handle unix.FileHandle
	dirs   []string // its directories still to be visited
	next   int64    // position of the rest of its entries
	read   bool     // there are no more entries
}

// pop removes a name and releases memory that the others do not need.
func (l *level) pop() string {
	n := len(l.dirs) - 1
	name := l.dirs[n]
	l.dirs[n] = ""
	l.dirs = l.dirs[:n]
	if cap(l.dirs) > 2*n+16 {
		l.dirs = slices.Clone(l.dirs)
	}
	return name
}

// batch returns how many names may be kept beside kept others; at least one.
func batch(kept int) int { return max(1, min(maxBatch, maxNames-kept)) }

// Add counts path and everything below it, down to maxDepth levels: the error
// errDeep means that there is more.
func (u *Usage) Add(path string) error {
	at, first, err := u.enter(unix.AT_FDCWD, path)
	if at == nil {
		return err
	}
	defer func() { at.Close() }()
	way, kept := []level{first}, 0
	for {
		last := &way[len(way)-1]
		if len(last.dirs) == 0 && !last.read {
			if err := u.children(at, last, batch(kept)); err != nil {
				return err
			}
			kept += len(last.dirs)
		}
		if len(last.dirs) > 0 {
			name := last.pop()
			kept--
			if len(way) == maxDepth {
				u.deeper = true
				continue
			}
			down, entered, err := u.enter(int(at.Fd()), name)
			if err != nil {
				return err
			}
			if down != nil {
				at.Close()
				at, way = down, append(way, entered)
			}
			continue
		}
		up, left, err := ascend(at, way[:len(way)-1])
		if err != nil {
			return &os.PathError{Op: "measure", Path: at.Name(), Err: err}
		}
		if up == nil {
			whole := math.Round(u.shared)
			u.Inodes, u.shared = u.Inodes+uint64(max(whole, 0)), u.shared-max(whole, 0)
			if u.deeper {
				return &os.PathError{Op: "measure", Path: path, Err: errDeep}
			}
			return nil
		}
		for _, dropped := range way[left:] {
			kept -= len(dropped.dirs)
		}
		at.Close()
		at, way = up, way[:left]
	}
}

// ascend opens the lowest of the directories above that still exists, and
// returns how many of them are left. It returns nil if there is none.
func ascend(at *os.File, above []level) (up *os.File, left int, err error) {
	if left = len(above); left == 0 {
		return nil, 0, nil
	}
	up, self, err := open(int(at.Fd()), "..")
	if err == nil && self == above[left-1].self {
		return up, left, nil
	}
	if err == nil {
		up.Close()
		err = errMoved
	}
	for ; left > 0; left-- {
		handle := above[left-1].handle
		if handle == (unix.FileHandle{}) {
			return nil, 0, err
		}
		fd, err := unix.OpenByHandleAt(int(at.Fd()), handle, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC)
		if err == nil {
			return os.NewFile(uintptr(fd), at.Name()), left, nil
		}
		if !errors.Is(err, unix.ESTALE) { // it was removed
			return nil, 0, fmt.Errorf("%w: %w", errMoved, err)
		}
	}
	return nil, 0, nil
}

// enter opens and counts a directory. It returns nil if the directory is gone
// or has become something else, which is then counted.
func (u *Usage) enter(dir int, name string) (*os.File, level, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, level{}, gone(name, err)
	}
	u.count(&st)
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, level{}, nil
	}
	f, self, err := open(dir, name)
	if err != nil {
		return nil, level{}, gone(name, err)
	}
	handle, _, err := unix.NameToHandleAt(int(f.Fd()), "", unix.AT_EMPTY_PATH)
	if err != nil {
		handle = unix.FileHandle{} // then it must not be moved
	}
	return f, level{self: self, handle: handle}, nil
}

func open(dir int, name string) (*os.File, inode, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, inode{}, err
	}
	f := os.NewFile(uintptr(fd), name)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		f.Close()
		return nil, inode{}, err
	}
	return f, inode{st.Dev, st.Ino}, nil
}

// children counts the entries of a directory from l.next on, except for
// directories: it adds the names of the next most of those to l, and keeps no
// other names.
func (u *Usage) children(dir *os.File, l *level, most int) error {
	fd := int(dir.Fd())
	if _, err := unix.Seek(fd, l.next, io.SeekStart); err != nil {
		return &os.PathError{Op: "measure", Path: dir.Name(), Err: err}
	}
	if u.buffer == nil {
		u.buffer = make([]byte, 32<<10)
	}
	buffer := u.buffer
	if most == 1 { // the entries after the next name are read again
		buffer = buffer[:4<<10]
	}
	for len(l.dirs) < most {
		n, err := unix.Getdents(fd, buffer)
		if u.Stop != nil && u.Stop() {
			return ErrStopped
		}
		if n <= 0 {
			l.read = true
			return gone(dir.Name(), err)
		}
		for entries := buffer[:n]; len(entries) > 0 && len(l.dirs) < most; {
			var e dirent
			e, entries = nextDirent(entries)
			l.next = e.next
			if e.name == "." || e.name == ".." {
				continue
			}
			if err := u.child(fd, e, l); err != nil {
				return err
			}
		}
	}
	return nil
}

func (u *Usage) child(dir int, e dirent, l *level) error {
	if e.kind == unix.DT_DIR {
		l.dirs = append(l.dirs, e.name)
		return nil
	}
	var st unix.Stat_t
	if err := unix.Fstatat(dir, e.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return gone(e.name, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		l.dirs = append(l.dirs, e.name)
		return nil
	}
	u.count(&st)
	return nil
}

// dirent is an entry of a directory as getdents64(2) returns it.
type dirent struct {
	name string
	kind byte  // DT_UNKNOWN on some file systems
	next int64 // position of the entry after it
}

func nextDirent(entries []byte) (e dirent, rest []byte) {
	const nameAt = 19
	size := binary.NativeEndian.Uint16(entries[16:])
	name, _, _ := bytes.Cut(entries[nameAt:size], []byte{0})
	return dirent{string(name), entries[18], int64(binary.NativeEndian.Uint64(entries[8:]))}, entries[size:]
}

func (u *Usage) count(st *unix.Stat_t) {
	bytes := uint64(st.Blocks) * 512
	if st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Nlink > 1 {
		key := inode{st.Dev, st.Ino}
		if u.linked[key] {
			return
		}
		if len(u.linked) >= maxLinked { // each link counts its share
			links := uint64(st.Nlink) //nolint:unconvert // it has 32 bits on arm64
			u.Bytes += bytes / links
			u.shared += 1 / float64(links)
			return
		}
		if u.linked == nil {
			u.linked = map[inode]bool{}
		}
		u.linked[key] = true
	}
	u.Bytes += bytes
	u.Inodes++
}

// gone ignores the absence of a file that was deleted since its name was read.
func gone(name string, err error) error {
	if err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	return &os.PathError{Op: "measure", Path: name, Err: err}
}

// Remove is os.RemoveAll for what a container has made: it has two descriptors
// open at any depth, and keeps as little as Usage does. Others may remove the
// tree as well, but not change it otherwise meanwhile.
func Remove(path string) (err error) {
	const attempts = 1000
	for range attempts {
		if err = remove(path); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return err
}

// remove is an attempt of Remove. It removes an emptied directory when it comes
// across it again in the parent. It first moves what is nested too deep to the top.
func remove(path string) error {
	switch err := os.Remove(path); {
	case err == nil, errors.Is(err, fs.ErrNotExist):
		return nil
	case !errors.Is(err, unix.ENOTEMPTY):
		return err
	}
	at, self, err := open(unix.AT_FDCWD, path)
	if err != nil {
		return err
	}
	defer func() { at.Close() }()
	top, _, err := open(int(at.Fd()), ".")
	if err != nil {
		return err
	}
	defer top.Close()
	way, kept := []level{{self: self}}, 0
	for {
		last := &way[len(way)-1]
		if len(last.dirs) == 0 {
			if last.dirs, err = emptied(at, batch(kept)); err != nil {
				return err
			}
			kept += len(last.dirs)
		}
		if len(last.dirs) > 0 { // down into one that is not empty
			name := last.pop()
			kept--
			if len(way) == maxDepth {
				if err := unix.Renameat2(int(at.Fd()), name, int(top.Fd()), "crius-"+rand.Text(), unix.RENAME_NOREPLACE); err != nil {
					return &os.PathError{Op: "remove", Path: name, Err: err}
				}
				continue
			}
			down, self, err := open(int(at.Fd()), name)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return &os.PathError{Op: "remove", Path: name, Err: err}
			}
			at.Close()
			at, way = down, append(way, level{self: self})
			continue
		}
		if way = way[:len(way)-1]; len(way) == 0 {
			return os.Remove(path)
		}
		up, above, err := open(int(at.Fd()), "..")
		if err != nil {
			return &os.PathError{Op: "remove", Path: at.Name(), Err: err}
		}
		at.Close()
		at = up
		if above != way[len(way)-1].self {
			return &os.PathError{Op: "remove", Path: at.Name(), Err: errMoved}
		}
	}
}

// emptied removes the entries of a directory except for non-empty directories,
// and returns up to most of those; none means that nothing is left.
func emptied(dir *os.File, most int) (dirs []string, err error) {
	for {
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return nil, err
		}
		removed := false
		for {
			names, err := dir.Readdirnames(maxBatch)
			for _, name := range names {
				full, err := removeEntry(dir, name)
				if err != nil {
					return nil, &os.PathError{Op: "remove", Path: name, Err: err}
				}
				if !full {
					removed = true
				} else if dirs = append(dirs, name); len(dirs) == most {
					return dirs, nil
				}
			}
			if len(dirs) > 0 {
				return dirs, nil
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return nil, err
			}
		}
		if !removed {
			return nil, nil
		}
	}
}

// removeEntry removes name; full reports that it is a directory that is not
// empty.
func removeEntry(dir *os.File, name string) (full bool, err error) {
	err = unix.Unlinkat(int(dir.Fd()), name, 0)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
		asDir := unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR)
		if errors.Is(asDir, unix.ENOTEMPTY) {
			return true, nil
		}
		if !errors.Is(asDir, unix.ENOTDIR) {
			err = asDir
		}
	}
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	return false, err
}
