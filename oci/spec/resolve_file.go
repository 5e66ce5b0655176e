package spec

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// ReadRootfsFile reads a file of a container's root file system. It resolves
// every link on the way inside that tree, and refuses kernel magic links and
// anything but a regular file of at most limit bytes (CVE-2025-4437,
// CVE-2026-47262). A missing file is fs.ErrNotExist; everything else that is
// wrong with the file is fault.Invalid, because the image caused it.
func ReadRootfsFile(rootfs, name string, limit int64) ([]byte, error) {
	fd, err := openBelow(rootfs, name)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return regular.ReadFD(fd, "the image's "+name, limit)
}

// ResolveBelow returns the path of the directory or regular file to which name
// leads in a mounted image, with every link resolved inside the image. Errors
// are those of ReadRootfsFile.
func ResolveBelow(rootfs, name string) (string, error) {
	fd, err := openBelow(rootfs, name)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	link := "/proc/self/fd/" + strconv.Itoa(fd)
	info, err := os.Stat(link)
	if err != nil {
		return "", fmt.Errorf("the image's %s: %w", name, err)
	}
	if !info.IsDir() && !info.Mode().IsRegular() {
		return "", fmt.Errorf("the image's %s is neither a directory nor a regular file: %w", name, fault.Invalid)
	}
	return os.Readlink(link)
}

// CheckRootfs refuses a root file system that has a link or a file in place of
// /proc, /sys or /dev: a runtime may follow it and make its links and mounts on
// the node (CVE-2026-41579, CVE-2026-47766), or take the image's files for the
// kernel's (CVE-2023-27561). It also refuses mounts that links of the image
// lead into /proc, where crun would make them (CVE-2019-16884).
func CheckRootfs(rootfs string, mounts []*cri.Mount) error {
	for _, name := range []string{"/proc", "/sys", "/dev"} {
		info, err := os.Lstat(filepath.Join(rootfs, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("check the image's %s: %w", name, err)
		}
		if !info.IsDir() {
			return invalid("the image's %s is not a directory", name)
		}
	}
	for _, m := range mounts {
		if err := checkLinks(rootfs, m.GetContainerPath(), m.GetHostPath()); err != nil {
			return fmt.Errorf("mount at %q: %w", m.GetContainerPath(), err)
		}
	}
	return nil
}

// checkLinks refuses a mount of source that links of the image lead into /proc.
func checkLinks(rootfs, place, source string) error {
	target, err := securejoin.SecureJoin(rootfs, place)
	if err != nil {
		return invalid("resolve symbolic links in the image: %v", err)
	}
	return validateProcMount(strings.TrimPrefix(target, filepath.Clean(rootfs)), source)
}

// openTries is the number of attempts to look up a path. The kernel gives up on
// a path with ".." whenever anything on the node is renamed or mounted
// meanwhile (openat2(2), EAGAIN), and a pod may do that all the time.
const openTries = 128

// openBelow returns an O_PATH descriptor, because opening a device or a FIFO
// has side effects.
func openBelow(rootfs, name string) (fd int, err error) {
	root, err := unix.Open(rootfs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		// Must not look like a file that is missing from the image.
		return -1, precondition("root file system %s cannot be opened (%v): is it mounted?", rootfs, err)
	}
	defer unix.Close(root)
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	for range openTries {
		if fd, err = unix.Openat2(root, name, &how); err != unix.EAGAIN {
			break
		}
	}
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return -1, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	case errors.Is(err, unix.ELOOP):
		return -1, fmt.Errorf("the image's %s is a dangling symbolic link: %w", name, fault.Invalid)
	case err != nil:
		return -1, fmt.Errorf("open the image's %s: %w", name, err)
	}
	return fd, nil
}
