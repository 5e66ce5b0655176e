package overlay

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/thread"
)

// mapped calls mount, which must mount something at target. Meanwhile the directories lower show
// their files with the owners that the user namespace at userNS gives them (mount_setattr(2), Linux
// 5.12; as overlay layers 5.19).
//
// All this happens on a thread with a mount table of its own, where each directory is covered by
// its ID-mapped twin. Only the finished mount leaves the thread, so nobody else sees a twin, and
// none is left behind, whatever dies.
func mapped(userNS string, lower []string, target string, mount func() error) error {
	tree := -1
	err := thread.Run(func() (err error) {
		if err := privateMounts(); err != nil {
			return err
		}
		if err := coverMapped(userNS, lower); err != nil {
			return err
		}
		if err := mount(); err != nil {
			return err
		}
		tree, err = unix.OpenTree(unix.AT_FDCWD, target, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		return os.NewSyscallError("open_tree", err)
	})
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach id-mapped mount to %s: %w", target, err)
	}
	return nil
}

// CheckMapping says why no overlay can have the owners that the user namespace at userNS gives
// them: the kernel or the file system of the two directories, which stand for layers, lacks
// ID-mapped mounts, which is fault.Unimplemented. It changes nothing.
func CheckMapping(userNS string, layers [2]string) error {
	return thread.Run(func() error {
		if err := privateMounts(); err != nil {
			return err
		}
		if err := coverMapped(userNS, layers[:]); err != nil {
			return err
		}
		return tryLayers(layers[:])
	})
}

// tryLayers makes an overlay of read-only layers without mounting it.
func tryLayers(dirs []string) error {
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fs)
	var paths pathSet
	defer paths.close()
	lower := make([]string, len(dirs))
	for i, dir := range dirs {
		lower[i] = "/proc/self/fd/" + paths.number(dir)
	}
	if paths.err != nil {
		return paths.err
	}
	for _, p := range append([]parameter{{"lowerdir", strings.Join(lower, ":")}}, obeyNothing...) {
		if err := p.set(fs); err != nil {
			return err
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return fmt.Errorf("overlay on this kernel does not support ID-mapped layers (requires Linux 5.19): %w%s: %w", err, contextLog(fs), fault.Unimplemented)
	}
	return nil
}

// privateMounts gives the calling thread a mount table of its own.
func privateMounts() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare mounts: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	return nil
}

// coverMapped mounts on each directory the directory itself, id-mapped.
func coverMapped(userNS string, dirs []string) error {
	users, err := os.Open(userNS)
	if err != nil {
		return err
	}
	defer users.Close()
	for _, dir := range dirs {
		if err := coverOne(int(users.Fd()), dir); err != nil {
			return &os.PathError{Op: "map owners of", Path: dir, Err: err}
		}
	}
	return nil
}

func coverOne(users int, dir string) error {
	tree, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(users)}
	err = unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("this kernel or file system does not support ID-mapped mounts: %w: %w", err, fault.Unimplemented)
	}
	if err != nil {
		return err
	}
	return unix.MoveMount(tree, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH)
}
