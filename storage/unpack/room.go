package unpack

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/race"
	"github.com/crius-run/crius/internal/thread"
)

// A room is a mount namespace that has what a worker needs of the node and nothing else: the directories of the store,
// which it cannot change, its program and /dev/null. So what Landlock does not know, modes, owners, attributes and devices, is out of
// its reach, too.
//
// There is one, and each worker has a copy, in which it may change its own directories. To copy the node's namespace each time would
// take long where there are many pods, and would hold their mounts for as long as a pull takes.
type room struct {
	namespace *os.File
	seen      []identity // of its directories when it was made
}

// roomProgram is the worker's program in a room.
const roomProgram = "/crius-unpack"

// room returns the room of all workers. The caller must close it. If something else is mounted at one of the directories by now,
// the room is made again.
func (p *Program) room() (namespace *os.File, err error) {
	if p.roomless != nil {
		return nil, p.roomless
	}
	p.making.Lock()
	defer p.making.Unlock()
	seen := identify(p.dirs)
	if p.made.namespace == nil || !slices.Equal(seen, p.made.seen) {
		_ = p.made.namespace.Close()
		p.made = room{seen: seen}
		if p.made.namespace, err = makeRoom(p.empty, p.dirs); err != nil {
			return nil, err
		}
	}
	fd, err := unix.FcntlInt(p.made.namespace.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("dup", err)
	}
	return os.NewFile(uintptr(fd), "room"), nil
}

// identity tells a directory, and what is mounted there, from others. It is zero if there is none.
type identity struct{ device, inode, mount uint64 }

func identify(dirs []string) (all []identity) {
	for _, dir := range dirs {
		var st unix.Statx_t
		var id identity
		if unix.Statx(unix.AT_FDCWD, dir, unix.AT_STATX_DONT_SYNC, unix.STATX_INO|unix.STATX_MNT_ID, &st) == nil {
			id = identity{unix.Mkdev(st.Dev_major, st.Dev_minor), st.Ino, st.Mnt_id}
		}
		all = append(all, id)
	}
	return all
}

// enterRoom moves the calling thread, which must be one of thread.Run's, to a copy of a room, in which it
// may change what is in writable.
func enterRoom(namespace *os.File, writable []string) error {
	if err := enterCopy(namespace); err != nil {
		return err
	}
	for _, dir := range writable {
		if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
			return &os.PathError{Op: "mount", Path: dir, Err: err}
		}
		if err := remount(dir, harmless); err != nil {
			return err
		}
	}
	return nil
}

func enterCopy(namespace *os.File) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("setns", err)
	}
	return os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_NEWNS))
}

// makeNamespace returns a mount namespace as furnish leaves that of its thread, which is at first a copy of the node's with
// which it shares no later mounts.
func makeNamespace(furnish func() error) (namespace *os.File, err error) {
	err = thread.Run(func() error {
		self, err := os.Open("/proc/thread-self") // which has no name afterwards
		if err != nil {
			return err
		}
		defer self.Close()
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return &os.PathError{Op: "make private", Path: "/", Err: err}
		}
		if err := furnish(); err != nil {
			return err
		}
		fd, err := unix.Openat(int(self.Fd()), "ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			namespace = os.NewFile(uintptr(fd), "room")
		}
		return err
	})
	return namespace, err
}

// makeEmptyRoom returns a room without directories. It is made while the program has a name: a file that was
// deleted cannot be mounted.
func makeEmptyRoom(path string, program *os.File) (namespace *os.File, err error) {
	return makeNamespace(func() error {
		inside, err := openTree(path)
		if err != nil {
			return err
		}
		defer unix.Close(inside)
		null, err := openTree(os.DevNull)
		if err != nil {
			return err
		}
		defer unix.Close(null)
		if err := moveToEmptyRoot(); err != nil {
			return err
		}
		return errors.Join(os.Mkdir(filepath.Dir(os.DevNull), 0o755), os.WriteFile(os.DevNull, nil, 0o644), os.WriteFile(roomProgram, nil, 0o644),
			put(null, os.DevNull, harmless&^unix.MS_NODEV), put(inside, roomProgram, harmless&^unix.MS_NOEXEC), same(roomProgram, program), remount("/", unix.MS_RDONLY|harmless))
	})
}

// same returns an error unless a file is at a path.
func same(path string, file *os.File) error {
	there, err := os.Stat(path)
	if err != nil {
		return err
	}
	opened, err := file.Stat()
	if err == nil && !os.SameFile(there, opened) {
		err = fmt.Errorf("crius-unpack has been replaced while it was opened")
	}
	return err
}

// makeRoom returns a copy of a room that has directories. Those that are missing are left out.
func makeRoom(empty *os.File, dirs []string) (namespace *os.File, err error) {
	return makeNamespace(func() (err error) {
		var places []place
		defer func() {
			for _, p := range places {
				_ = unix.Close(p.tree)
			}
		}()
		for _, dir := range slices.Concat(dirs, race.Needs()) {
			target, err := filepath.EvalSymlinks(dir)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return err
			}
			for _, path := range slices.Compact([]string{target, dir}) {
				tree, err := openTree(target)
				if err != nil {
					return err
				}
				places = append(places, place{tree, path, target})
			}
		}
		if err := errors.Join(enterCopy(empty), remount("/", harmless)); err != nil {
			return err
		}
		flags := uintptr(harmless)
		if race.Enabled {
			flags &^= unix.MS_NOEXEC // for libraries
		}
		slices.SortStableFunc(places, func(a, b place) int { return cmp.Compare(len(a.path), len(b.path)) }) // what is in another comes later
		links := slices.DeleteFunc(slices.Clone(places), func(p place) bool { return p.path == p.real })
		reals := slices.DeleteFunc(slices.Clone(places), func(p place) bool { return p.path != p.real })
		for _, p := range slices.Concat(reals, links) {
			if there, err := filepath.EvalSymlinks(p.path); err == nil && there == p.real && p.path != p.real {
				continue // the link is in another of them
			}
			if err := errors.Join(os.MkdirAll(p.path, 0o755), put(p.tree, p.path, flags)); err != nil {
				return err
			}
		}
		return remount("/", unix.MS_RDONLY|harmless)
	})
}

// place is a directory of the node that is in a room.
type place struct {
	tree int // detached mount
	path string
	real string // its path without symbolic links
}

// openTree returns a detached mount of what is at a path.
func openTree(path string) (fd int, err error) {
	if fd, err = unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC); err != nil {
		return -1, &os.PathError{Op: "open_tree", Path: path, Err: err}
	}
	return fd, nil
}

const harmless = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// put mounts a detached mount at a path, from where it can only be read.
func put(tree int, path string, flags uintptr) error {
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "move_mount", Path: path, Err: err}
	}
	return remount(path, unix.MS_RDONLY|flags)
}

func remount(path string, flags uintptr) error {
	if err := unix.Mount("", path, "", unix.MS_REMOUNT|unix.MS_BIND|flags, ""); err != nil {
		return &os.PathError{Op: "remount", Path: path, Err: err}
	}
	return nil
}

// moveToEmptyRoot gives the calling thread, and its mount namespace, an empty file system as its root.
func moveToEmptyRoot() error {
	const somewhere = "/proc" // which is no longer needed
	if err := unix.Mount("room", somewhere, "tmpfs", harmless, "mode=0755,size=1m"); err != nil {
		return &os.PathError{Op: "mount", Path: somewhere, Err: err}
	}
	if err := unix.Chdir(somewhere); err != nil {
		return &os.PathError{Op: "chdir", Path: somewhere, Err: err}
	}
	if err := unix.PivotRoot(".", "."); err != nil { // the old root is mounted upon the new one
		return os.NewSyscallError("pivot_root", err)
	}
	return os.NewSyscallError("umount", unix.Unmount(".", unix.MNT_DETACH))
}
