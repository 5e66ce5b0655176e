package monitor

import (
	"errors"
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// labelAttribute is where a file has its SELinux context.
const labelAttribute = "security.selinux"

// maxRelabelDepth bounds the directories that are open at the same time.
const maxRelabelDepth = 512

// relabel gives the file or directory at path, and all below it, the SELinux context
// label. Links are followed on the way to path, as a runtime does that mounts it, and
// none below: whose volume it is may be changing it meanwhile.
//
// A directory gets the label after what is in it, so that one that has it needs no
// second look. A file system without labels is left as it is. So is one that is mounted
// below and cannot be relabelled: the container has it with the volume, but it may be
// read-only, or the kernel's.
func relabel(label string) func(path string) error {
	return func(path string) error {
		fd, err := wire.Open(opath, 0, path)
		if err != nil {
			return err
		}
		defer syscall.Close(fd)
		var buf [4096]byte
		n, err := syscall.Readlink(procFD(fd), buf[:])
		if err != nil {
			return err
		}
		if systemPath(string(buf[:n])) {
			return wire.SystemPath
		}
		var top syscall.Stat_t
		if err := syscall.Fstat(fd, &top); err != nil {
			return err
		}
		if labelled(fd, label) {
			return nil
		}
		w := relabelling{label: label, device: top.Dev}
		if top.Mode&syscall.S_IFMT == syscall.S_IFDIR {
			err = w.tree(fd, ".", 0)
		} else {
			err = w.set(fd)
		}
		if errors.Is(err, syscall.ENOTSUP) {
			return nil
		}
		return err
	}
}

const opath = 0x200000 // O_PATH

// systemPath tells whether path is the system's, which no pod may have for itself.
func systemPath(path string) bool {
	for _, dir := range []string{"/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/sys", "/usr"} {
		if path == dir || len(path) > len(dir) && path[:len(dir)+1] == dir+"/" {
			return true
		}
	}
	for _, dir := range []string{"/", "/home", "/media", "/mnt", "/opt", "/root", "/run", "/srv", "/tmp", "/var", "/var/cache", "/var/lib", "/var/log", "/var/run", "/var/tmp"} {
		if path == dir {
			return true
		}
	}
	return false
}

// relabelling is one call of relabel.
type relabelling struct {
	label  string
	device uint64
}

// tree relabels the directory called name in dir, after all that is in it.
func (w *relabelling) tree(dir int, name string, depth int) error {
	if depth > maxRelabelDepth {
		return syscall.ENAMETOOLONG
	}
	fd, err := syscall.Openat(dir, name, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	switch err {
	case nil:
	case syscall.ENOTDIR, syscall.ELOOP: // ELOOP: a link
		return w.file(dir, name)
	default:
		return gone(err)
	}
	defer syscall.Close(fd)
	var buf [2048]byte
	for {
		n, err := syscall.ReadDirent(fd, buf[:])
		if err != nil {
			return gone(err)
		}
		if n == 0 {
			return w.set(fd)
		}
		_, _, names := syscall.ParseDirent(buf[:n], -1, nil)
		for _, entry := range names {
			if err := w.tree(fd, entry, depth+1); err != nil {
				return err
			}
		}
	}
}

// file relabels what is called name in dir and is no directory: a link itself, not
// what it leads to.
func (w *relabelling) file(dir int, name string) error {
	fd, err := syscall.Openat(dir, name, opath|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return gone(err)
	}
	defer syscall.Close(fd)
	return w.set(fd)
}

// mounted reports whether a file is in a file system that is mounted below the volume.
func (w *relabelling) mounted(fd int) bool {
	var st syscall.Stat_t
	return syscall.Fstat(fd, &st) == nil && st.Dev != w.device
}

func (w *relabelling) set(fd int) error {
	if labelled(fd, w.label) {
		return nil
	}
	err := gone(syscall.Setxattr(procFD(fd), labelAttribute, append([]byte(w.label), 0), 0))
	if err != nil && w.mounted(fd) {
		return nil
	}
	return err
}

// procFD is a path to an open file that leads nowhere else.
func procFD(fd int) string { return "/proc/self/fd/" + itoa(fd) }

func labelled(fd int, label string) bool {
	var buf [4096]byte
	n, err := syscall.Getxattr(procFD(fd), labelAttribute, buf[:])
	if err == nil && n > 0 && buf[n-1] == 0 {
		n--
	}
	return err == nil && string(buf[:n]) == label
}

// gone makes no error of what has been removed meanwhile.
func gone(err error) error {
	if errors.Is(err, syscall.ENOENT) {
		return nil
	}
	return err
}
