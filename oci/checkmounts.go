package oci

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
)

// checkCreated refuses a created container if links have led its mounts
// elsewhere: into /proc, or from there over a device or a masked path. oci/spec
// refuses those caused by links of the image, but volumes may contain links as
// well, which others can change at any time. The container's program has not
// run yet.
func checkCreated(pid int, s *specs.Spec) error {
	if pid == 0 {
		return nil // it has already ended
	}
	var refused error
	err := mount.EachOf(pid, func(m mount.Info) bool {
		refused = checkMount(m, s)
		return refused == nil
	})
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("the container ended while it was created, before its mounts were checked: %w", err)
	}
	if err != nil {
		return fmt.Errorf("read the container's mounts: %w", err)
	}
	return refused
}

// checkMount looks at where a mount is and at what it shows.
func checkMount(m mount.Info, s *specs.Spec) error {
	asked := func(dest string) (specs.Mount, bool) {
		i := slices.IndexFunc(s.Mounts, func(m specs.Mount) bool { return path.Clean(m.Destination) == dest })
		if i < 0 {
			return specs.Mount{}, false
		}
		return s.Mounts[i], true
	}
	_, exact := asked(m.Point)
	masked, readOnly := slices.Contains(s.Linux.MaskedPaths, m.Point), slices.Contains(s.Linux.ReadonlyPaths, m.Point)
	ofProc := m.Type == "proc" && m.Root != "/"
	switch proc, _ := asked("/proc"); {
	case exact:
		return nil
	case strings.HasPrefix(m.Point, "/proc/") && proc.Type == "bind": // the node's /proc, with what is mounted there
		return nil
	case masked && ofProc:
		return fmt.Errorf("masked path %s exposes %s of /proc: /dev/null has been replaced by a symbolic link: %w", m.Point, m.Root, fault.Invalid)
	case strings.HasPrefix(m.Point, "/proc/") && !masked && !(readOnly && m.Type == "proc") && m.Point != binfmtMisc:
		return fmt.Errorf("a mount would end up at %s: symbolic links in volumes must not redirect mounts into /proc: %w", m.Point, fault.Invalid)
	case strings.HasPrefix(m.Point, "/dev/") && ofProc:
		return fmt.Errorf("%s would expose %s of /proc: a device path must not be a symbolic link in a volume: %w", m.Point, m.Root, fault.Invalid)
	}
	return nil
}

// binfmtMisc may be mounted by the kernel's automounter.
const binfmtMisc = "/proc/sys/fs/binfmt_misc"

// checkMasks refuses a restored container that lacks the mounts over its masked and read-only paths: criu restores
// those that there were, and a path that was missing on the node of the checkpoint may be there on this one.
func checkMasks(pid int, l *specs.Linux) error {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open root of", Path: fmt.Sprintf("/proc/%d", pid), Err: err}
	}
	defer unix.Close(root)
	at := map[string]mount.Info{}
	err = mount.EachOf(pid, func(m mount.Info) bool {
		at[m.Point] = m // of several mounts the last one is seen
		return true
	})
	if err != nil {
		return fmt.Errorf("read the container's mounts: %w", err)
	}
	for _, place := range slices.Concat(l.MaskedPaths, l.ReadonlyPaths) {
		fd, err := unix.Openat2(root, place, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			continue
		}
		if err != nil {
			return &os.PathError{Op: "open in the container", Path: place, Err: err}
		}
		_ = unix.Close(fd)
		m, mounted := at[path.Clean(place)]
		masked := slices.Contains(l.MaskedPaths, place)
		if !mounted || masked && (m.Type == "proc" || m.Type == "sysfs") || !masked && !m.ReadOnly {
			return fmt.Errorf("%s was not there when the container was checkpointed, and would be open to it on this node; make a new checkpoint: %w", place, fault.Precondition)
		}
	}
	return nil
}
