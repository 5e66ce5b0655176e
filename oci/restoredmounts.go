package oci

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/thread"
)

// restoredMounts are the mounts of a restored container. criu makes what its images say, as root, where it sees the
// files of the node. So each of them must be one that the request makes.
type restoredMounts struct {
	spec             *specs.Spec
	root             int // descriptor of the container's root
	all              map[int]mount.Info
	asked            map[int]specs.Mount
	masked, readOnly map[int]bool
}

// checkMounts refuses a restored container with mounts that its request does not make, or makes in another way.
func checkMounts(pid int, rootfs string, s *specs.Spec) error {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open root of", Path: fmt.Sprintf("/proc/%d", pid), Err: err}
	}
	defer unix.Close(root)
	r := restoredMounts{s, root, map[int]mount.Info{}, map[int]specs.Mount{}, map[int]bool{}, map[int]bool{}}
	if err := r.read(pid); err != nil {
		return err
	}
	if err := r.find(rootfs); err != nil {
		return err
	}
	if err := r.makeReadOnly(pid); err != nil {
		return err
	}
	for id, m := range r.all {
		why, err := r.differs(id, m)
		if err != nil {
			return err
		}
		if why != "" {
			return fmt.Errorf("the mount of the checkpoint at %s is not one of the request: %s: %w", m.Point, why, fault.Precondition)
		}
	}
	return nil
}

// read reads the mounts of the container.
func (r *restoredMounts) read(pid int) error {
	err := mount.EachOf(pid, func(m mount.Info) bool {
		r.all[m.ID] = m
		return true
	})
	if err != nil {
		return fmt.Errorf("read the container's mounts: %w", err)
	}
	return nil
}

// makeReadOnly makes volumes read-only again: criu makes one writable whose directory is mounted twice, or below
// another volume. No process has run since. One that has a file open for writing there keeps the volume as it is, and
// so does a kernel before 5.12: such a container is refused.
func (r *restoredMounts) makeReadOnly(pid int) error {
	var volumes []int
	defer func() {
		for _, fd := range volumes {
			_ = unix.Close(fd)
		}
	}()
	for id, asked := range r.asked {
		if !isVolume(asked) || !has(asked.Options, "ro", "rro") || r.all[id].ReadOnly {
			continue
		}
		fd, err := r.open(asked.Destination)
		if err != nil {
			return err
		}
		volumes = append(volumes, fd)
	}
	if len(volumes) == 0 {
		return nil
	}
	space, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return err
	}
	defer space.Close()
	err = thread.Run(func() error { // the kernel changes mounts of the caller's mount namespace alone
		if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(int(space.Fd()), unix.CLONE_NEWNS)); err != nil {
			return fmt.Errorf("enter the container's mount namespace: %w", err)
		}
		for _, fd := range volumes {
			_ = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}) // the comparison notices
		}
		return nil
	})
	if err != nil {
		return err
	}
	return r.read(pid)
}

// find finds the mounts of the request, wherever links of the image have led them.
func (r *restoredMounts) find(rootfs string) error {
	root := specs.Mount{Destination: "/", Source: rootfs}
	if r.spec.Root.Readonly {
		root.Options = []string{"ro"}
	}
	for _, m := range append([]specs.Mount{root}, r.spec.Mounts...) {
		id, err := r.at(m.Destination)
		if err != nil {
			return err
		}
		r.asked[id] = m
	}
	for _, list := range []struct {
		paths []string
		ids   map[int]bool
	}{{r.spec.Linux.MaskedPaths, r.masked}, {r.spec.Linux.ReadonlyPaths, r.readOnly}} {
		for _, place := range list.paths {
			id, err := r.at(place)
			if err == nil {
				list.ids[id] = true
			} else if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
				return err
			}
		}
	}
	return nil
}

// open opens a path of the container as its processes see it.
func (r *restoredMounts) open(place string) (int, error) {
	fd, err := unix.Openat2(r.root, place, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return -1, &os.PathError{Op: "open in the container", Path: place, Err: err}
	}
	return fd, nil
}

// at returns the mount that is seen at a path of the container.
func (r *restoredMounts) at(place string) (id int, err error) {
	fd, err := r.open(place)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return 0, &os.PathError{Op: "statx", Path: place, Err: err}
	}
	return int(st.Mnt_id), nil
}

// differs says why a mount is not one of the request; empty if it is one.
func (r *restoredMounts) differs(id int, m mount.Info) (why string, err error) {
	if asked, ok := r.asked[id]; ok {
		return r.differsFrom(asked, m)
	}
	above, asked := r.above(m)
	isCgroup := m.Type == "cgroup" || m.Type == "cgroup2"
	switch {
	case r.masked[id] && (m.Type == "tmpfs" && m.ReadOnly || strings.HasSuffix(m.Root, "/null") && m.Type != "proc" && r.isNull(m.Point)):
	case r.readOnly[id] && m.ReadOnly && m.Device == above.Device:
	case m.Point == "/dev/console" && m.Type == "devpts" && r.spec.Process.Terminal:
	case m.Point == binfmtMisc && m.Type == "autofs":
	case asked.Type == "cgroup" && isCgroup && (m.ReadOnly || !has(asked.Options, "ro")): // version 1 has one for each controller
	case isBind(asked): // which may have others below it
		rest, _ := filepath.Rel(above.Point, m.Point)
		return r.differsFrom(specs.Mount{Type: "bind", Destination: m.Point, Source: filepath.Join(asked.Source, rest)}, m)
	default:
		return fmt.Sprintf("it shows %s of a file system of the type %s, and the request has no mount there", m.Root, m.Type), nil
	}
	return "", nil
}

// above returns the mount of the request around another one.
func (r *restoredMounts) above(m mount.Info) (found mount.Info, asked specs.Mount) {
	for id, of := range r.asked {
		at := r.all[id]
		if strings.HasPrefix(m.Point, strings.TrimSuffix(at.Point, "/")+"/") && len(at.Point) > len(found.Point) {
			found, asked = at, of
		}
	}
	return found, asked
}

func isVolume(m specs.Mount) bool { return m.Destination != "/" && isBind(m) }

func isBind(m specs.Mount) bool {
	return m.Type == "bind" || has(m.Options, "bind", "rbind")
}

func has(options []string, any ...string) bool {
	return slices.ContainsFunc(options, func(o string) bool { return slices.Contains(any, o) })
}

// differsFrom compares a mount with what the request has there.
func (r *restoredMounts) differsFrom(asked specs.Mount, m mount.Info) (why string, err error) {
	if asked.Type == "cgroup" && m.Type == "tmpfs" && m.Root == "/" { // with the mounts of version 1, and nothing of the node
		return "", nil
	}
	if has(asked.Options, "ro", "rro") && !m.ReadOnly {
		why = "it can be written to"
		if isVolume(asked) {
			why += ", and has files open for writing or the kernel is older than 5.12; criu makes a volume writable whose directory is mounted twice or below another volume: mount it once, and take a new checkpoint"
		}
		return why, nil
	}
	flags := strings.Split(m.Flags, ",")
	for _, flag := range []string{"nosuid", "nodev", "noexec"} {
		if has(asked.Options, flag) && !slices.Contains(flags, flag) {
			return "it is not " + flag, nil
		}
	}
	switch {
	case asked.Type == "cgroup" && m.Type == "cgroup2":
		return "", nil
	case asked.Destination == "/" || isBind(asked):
		same, err := r.sameFile(asked)
		if err == nil && !same {
			why = "it does not show " + asked.Source
		}
		return why, err
	case m.Type != asked.Type || m.Root != "/":
		return fmt.Sprintf("it shows %s of a file system of the type %s, and not of %s", m.Root, m.Type, asked.Type), nil
	}
	return "", nil
}

// sameFile reports whether the container sees the source of a bind mount at its destination.
func (r *restoredMounts) sameFile(m specs.Mount) (bool, error) {
	there, err := r.stat(m.Destination)
	if err != nil {
		return false, err
	}
	var here unix.Stat_t
	if err := unix.Stat(m.Source, &here); errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return false, nil
	} else if err != nil {
		return false, &os.PathError{Op: "stat", Path: m.Source, Err: err}
	}
	return here.Dev == there.Dev && here.Ino == there.Ino, nil
}

func (r *restoredMounts) stat(place string) (st unix.Stat_t, err error) {
	fd, err := r.open(place)
	if err != nil {
		return st, err
	}
	defer unix.Close(fd)
	return st, unix.Fstat(fd, &st)
}

func (r *restoredMounts) isNull(place string) bool {
	st, err := r.stat(place)
	return err == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(1, 3)
}
