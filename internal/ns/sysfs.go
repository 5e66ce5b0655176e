package ns

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// WritableSysfs makes the sysfs of the network namespace pinned at path (empty:
// the node's) mountable writable until the returned file is closed. A network
// namespace has one sysfs, whose superblock is read-only for all users if its
// first mount was; mounts that are read-only themselves stay so. The superblock
// of the node's own /sys stays unchanged.
func WritableSysfs(path string) (hold *os.File, err error) {
	mount := func() error {
		hold, err = mountSysfs()
		return err
	}
	if path == "" {
		err = mount()
	} else {
		err = Do(path, mount)
	}
	if err != nil {
		return nil, fmt.Errorf("make sysfs of network namespace %q writable: %w", path, err)
	}
	return hold, nil
}

// mountSysfs makes a detached mount of the sysfs of the thread's network
// namespace.
func mountSysfs() (*os.File, error) {
	fs, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen sysfs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, fmt.Errorf("create sysfs: %w", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsmount sysfs: %w", err)
	}
	hold := os.NewFile(uintptr(fd), "sysfs")
	if err := reconfigureWritable(fd); err != nil {
		hold.Close()
		return nil, err
	}
	return hold, nil
}

// reconfigureWritable makes the superblock of a mount writable if it is
// read-only, unless it is that of the node's /sys.
func reconfigureWritable(mnt int) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(mnt, &fs); err != nil || fs.Flags&unix.ST_RDONLY == 0 {
		return err
	}
	var here, nodes unix.Stat_t
	if err := unix.Fstat(mnt, &here); err != nil {
		return err
	}
	if unix.Stat("/sys", &nodes) == nil && nodes.Dev == here.Dev {
		return nil
	}
	return remountWritable(mnt)
}

func remountWritable(mnt int) error {
	fs, err := unix.Fspick(mnt, "", unix.FSPICK_EMPTY_PATH|unix.FSPICK_CLOEXEC)
	if err != nil {
		return fmt.Errorf("fspick sysfs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetFlag(fs, "rw"); err != nil {
		return fmt.Errorf("set sysfs writable: %w", err)
	}
	if err := unix.FsconfigReconfigure(fs); err != nil {
		return fmt.Errorf("remount sysfs writable: %w", err)
	}
	return nil
}
