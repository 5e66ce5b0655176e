package ns

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// WritableSysfs makes the sysfs of the network namespace pinned at path one that can be
// mounted writable, and keeps it so until the file that it returns is closed. A network
// namespace has one sysfs, whose superblock is read-only for everybody if the first mount
// of it was; mounts that are read-only themselves stay so.
func WritableSysfs(path string) (hold *os.File, err error) {
	err = Do(path, func() error {
		hold, err = mountSysfs()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make sysfs of %s writable: %w", path, err)
	}
	return hold, nil
}

// mountSysfs mounts the sysfs of the thread's network namespace nowhere.
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

// reconfigureWritable makes the superblock of a mount writable, if it is not.
func reconfigureWritable(mnt int) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(mnt, &st); err != nil || st.Flags&unix.ST_RDONLY == 0 {
		return err
	}
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
