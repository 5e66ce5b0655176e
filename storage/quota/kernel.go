package quota

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// kernel is a file system's project quotas, as far as this package needs them.
type kernel interface {
	// enforced reports whether usage is counted and limits are enforced.
	enforced() bool
	// project returns the project of a directory, which new entries inherit.
	project(dir string) (uint32, error)
	setProject(dir string, id uint32) error
	account(id uint32) (account, error)
	setLimits(id uint32, limits Limits) error
	// next returns the first project from id on that has usage or limits; ok is false if there is
	// none.
	next(id uint32) (found uint32, ok bool)
}

// account is a file system's record of a project.
type account struct {
	limits Limits
	used   Limits
}

// filesystem is the kernel's file system at a path.
type filesystem string

// Commands of quotactl_fd(2), for project quotas. XFS and ext4 both know these.
const (
	setQuota     = 0x800008
	getQuota     = 0x800007
	getNextQuota = 0x800009
	getState     = 'X'<<8 + 8
	ofProjects   = 2
)

// dqblk is struct if_nextdqblk of linux/quota.h, which begins like struct if_dqblk.
type dqblk struct {
	blockHard, blockSoft uint64 // KiB
	space                uint64 // bytes
	inodeHard, inodeSoft uint64
	inodes               uint64
	blockTime, inodeTime uint64
	valid                uint32
	id                   uint32
}

const (
	validLimits = 1 | 4 // QIF_BLIMITS, QIF_ILIMITS
	blockSize   = 1024
)

// statv is struct fs_quota_statv of linux/dqblk_xfs.h.
type statv struct {
	version uint8
	_       uint8
	flags   uint16
	_       [156]byte
}

const (
	statvVersion = 1
	accounted    = 1 << 4 // FS_QUOTA_PDQ_ACCT
	limited      = 1 << 5 // FS_QUOTA_PDQ_ENFD
)

func (fs filesystem) enforced() bool {
	state := statv{version: statvVersion}
	err := fs.command(getState, 0, unsafe.Pointer(&state))
	return err == nil && state.flags&accounted != 0 && state.flags&limited != 0
}

func (fs filesystem) account(id uint32) (account, error) {
	var found dqblk
	err := fs.command(getQuota, id, unsafe.Pointer(&found))
	if err == unix.ENOENT { //nolint:errorlint // returned by a system call; XFS has no record of this project
		err = nil
	}
	return account{
		limits: Limits{Bytes: found.blockHard * blockSize, Inodes: found.inodeHard},
		used:   Limits{Bytes: found.space, Inodes: found.inodes},
	}, err
}

func (fs filesystem) setLimits(id uint32, limits Limits) error {
	wanted := dqblk{
		blockHard: (limits.Bytes + blockSize - 1) / blockSize,
		inodeHard: limits.Inodes,
		valid:     validLimits,
	}
	return fs.command(setQuota, id, unsafe.Pointer(&wanted))
}

func (fs filesystem) next(id uint32) (uint32, bool) {
	var found dqblk
	err := fs.command(getNextQuota, id, unsafe.Pointer(&found))
	return found.id, err == nil
}

func (fs filesystem) command(number uintptr, id uint32, data unsafe.Pointer) error {
	dir, err := open(string(fs))
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, uintptr(dir), number<<8|ofProjects, uintptr(id), uintptr(data), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// fsxattr is struct fsxattr of linux/fs.h.
type fsxattr struct {
	flags, extent, extents, project, cowExtent uint32
	_                                          [8]byte
}

const (
	getXattr = 0x801c581f // FS_IOC_FSGETXATTR
	setXattr = 0x401c5820 // FS_IOC_FSSETXATTR
	inherit  = 0x200      // FS_XFLAG_PROJINHERIT
)

func (filesystem) project(dir string) (uint32, error) {
	attributes, err := change(dir, func(*fsxattr) bool { return false })
	return attributes.project, err
}

func (filesystem) setProject(dir string, id uint32) error {
	_, err := change(dir, func(attributes *fsxattr) bool {
		attributes.project = id
		attributes.flags |= inherit
		return true
	})
	return err
}

// change reads the attributes of a directory, and writes them if edit says so.
func change(dir string, edit func(*fsxattr) bool) (attributes fsxattr, err error) {
	fd, err := open(dir)
	if err != nil {
		return attributes, err
	}
	defer unix.Close(fd)
	if err := ioctl(fd, getXattr, &attributes); err != nil {
		return attributes, &os.PathError{Op: "read project of", Path: dir, Err: err}
	}
	if !edit(&attributes) {
		return attributes, nil
	}
	if err := ioctl(fd, setXattr, &attributes); err != nil {
		return attributes, &os.PathError{Op: "set project of", Path: dir, Err: err}
	}
	return attributes, nil
}

func ioctl(fd int, request uintptr, attributes *fsxattr) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(attributes))); errno != 0 {
		return errno
	}
	return nil
}

func open(dir string) (int, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return fd, nil
}
