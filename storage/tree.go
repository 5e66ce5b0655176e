package storage

import (
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// tree adds up a directory tree. It goes by descriptors, since a container may
// nest directories deeper than a path can be long, and hide files there; and it
// has no more than two of them open at a time, however deep they go.
type tree struct {
	bytes, inodes uint64
	linked        map[inode]bool
	stop          func() bool // asked now and then; nil: never
}

type inode struct{ dev, ino uint64 }

var (
	errStopped = errors.New("stopped measuring")
	errMoved   = errors.New("a directory was moved while it was measured")
)

// level is a directory on the way down.
type level struct {
	self inode
	dirs []string // in it, still to be visited
}

// add counts path and everything below it.
func (t *tree) add(path string) error {
	at, self, err := t.enter(unix.AT_FDCWD, path)
	if at == nil {
		return err
	}
	defer func() { at.Close() }()
	var way []level
	for {
		// at has just been entered.
		dirs, err := t.children(at)
		if err != nil {
			return err
		}
		way = append(way, level{self, dirs})
		for down := (*os.File)(nil); down == nil; {
			last := &way[len(way)-1]
			if n := len(last.dirs); n > 0 {
				name := last.dirs[n-1]
				last.dirs = last.dirs[:n-1]
				if down, self, err = t.enter(int(at.Fd()), name); err != nil {
					return err
				}
				if down != nil {
					at.Close()
					at = down
				}
				continue
			}
			if way = way[:len(way)-1]; len(way) == 0 {
				return nil
			}
			up, above, err := open(int(at.Fd()), "..")
			if err != nil {
				return &os.PathError{Op: "measure", Path: at.Name(), Err: err}
			}
			at.Close()
			at = up
			if above != way[len(way)-1].self {
				return &os.PathError{Op: "measure", Path: at.Name(), Err: errMoved}
			}
		}
	}
}

// enter opens and counts a directory. It is nil if that is gone meanwhile, or
// has become something else, which then counts.
func (t *tree) enter(dir int, name string) (*os.File, inode, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, inode{}, gone(name, err)
	}
	t.count(&st)
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, inode{}, nil
	}
	f, self, err := open(dir, name)
	if err != nil {
		return nil, inode{}, gone(name, err)
	}
	return f, self, nil
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
	return f, inode{uint64(st.Dev), st.Ino}, nil
}

// children counts what is in a directory but for its directories, whose names
// it returns. It keeps no other names.
func (t *tree) children(dir *os.File) (dirs []string, err error) {
	for {
		names, err := dir.Readdirnames(1024)
		for _, name := range names {
			var st unix.Stat_t
			if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				if err := gone(name, err); err != nil {
					return nil, err
				}
				continue
			}
			if st.Mode&unix.S_IFMT == unix.S_IFDIR {
				dirs = append(dirs, name)
				continue
			}
			t.count(&st)
		}
		if t.stop != nil && t.stop() {
			return nil, errStopped
		}
		if errors.Is(err, io.EOF) {
			return dirs, nil
		}
		if err != nil {
			return dirs, gone(dir.Name(), err)
		}
	}
}

func (t *tree) count(st *unix.Stat_t) {
	if key := (inode{uint64(st.Dev), st.Ino}); st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Nlink > 1 {
		if t.linked[key] {
			return
		}
		t.linked[key] = true
	}
	t.bytes += uint64(st.Blocks) * 512
	t.inodes++
}

// gone forgives a file that was deleted since its name was read.
func gone(name string, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	return &os.PathError{Op: "measure", Path: name, Err: err}
}

// removeTree is os.RemoveAll for what a container has made: it has two
// descriptors open however deep that is. Nobody else may be at work in it.
func removeTree(path string) error {
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
	way := []level{{self: self}}
	for {
		last := &way[len(way)-1]
		if len(last.dirs) == 0 {
			if last.dirs, err = emptied(at); err != nil {
				return err
			}
		}
		if n := len(last.dirs); n > 0 { // down into one that is not empty
			down, self, err := open(int(at.Fd()), last.dirs[n-1])
			if err != nil {
				return &os.PathError{Op: "remove", Path: last.dirs[n-1], Err: err}
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
		last = &way[len(way)-1]
		if above != last.self {
			return &os.PathError{Op: "remove", Path: at.Name(), Err: errMoved}
		}
		n := len(last.dirs) - 1
		if err := unix.Unlinkat(int(at.Fd()), last.dirs[n], unix.AT_REMOVEDIR); err != nil {
			return &os.PathError{Op: "remove", Path: last.dirs[n], Err: err}
		}
		last.dirs = last.dirs[:n]
	}
}

// emptied removes what is in a directory but for directories that are not empty
// themselves, some of which it returns; none means that nothing is left.
func emptied(dir *os.File) (dirs []string, err error) {
	for {
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return nil, err
		}
		removed := false
		for {
			names, err := dir.Readdirnames(1024)
			for _, name := range names {
				err := unix.Unlinkat(int(dir.Fd()), name, 0)
				if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
					asDir := unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR)
					if errors.Is(asDir, unix.ENOTEMPTY) {
						dirs = append(dirs, name)
						continue
					}
					if !errors.Is(asDir, unix.ENOTDIR) {
						err = asDir
					}
				}
				if err != nil && !errors.Is(err, unix.ENOENT) {
					return nil, &os.PathError{Op: "remove", Path: name, Err: err}
				}
				removed = true
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
