package spec

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// ResolveDevices looks up the nodes behind asked, in that order. It follows
// links; a directory stands for all nodes below it, under the same names in the
// container.
func ResolveDevices(asked []*cri.Device) ([]Device, error) {
	var list []Device
	for _, d := range asked {
		host, container, access, err := validateDevice(d)
		if err != nil {
			return nil, err
		}
		real, err := filepath.EvalSymlinks(host)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("device %s does not exist on this node: %w", host, fault.Invalid)
		}
		if err != nil {
			return nil, fmt.Errorf("device %s: %w", host, err)
		}
		found, err := nodesAt(real, container, func(string) bool { return false })
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("device %s is neither a device node nor a directory with any: %w", host, fault.Invalid)
		}
		for i := range found {
			found[i].Access = access
		}
		list = append(list, found...)
	}
	return list, nil
}

// HostDevices returns the node's device nodes under /dev, for privileged
// containers, without terminals and the nodes that each container has of its
// own.
func HostDevices() ([]Device, error) { return hostDevices("/dev") }

func hostDevices(dev string) ([]Device, error) {
	own := []string{"console", "fd", "lxc", "mqueue", "ptmx", "pts", "shm"}
	found, err := nodesAt(dev, "/dev", func(name string) bool {
		return slices.Contains(own, name) || strings.HasPrefix(name, ".") || !utf8.ValidString(name) // a spec cannot name that
	})
	for i := range found {
		found[i].Access = "rwm"
	}
	return found, err
}

// nodesAt lists the node at path, or the nodes below it, with their paths below
// container. It leaves out entries of the top directory for which skip returns
// true.
func nodesAt(path, container string, skip func(name string) bool) ([]Device, error) {
	var list []Device
	err := filepath.WalkDir(path, func(entry string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // unplugged in the meantime
		}
		if err != nil {
			return err
		}
		name, err := filepath.Rel(path, entry)
		if err != nil {
			return err
		}
		if name != "." && skip(name) {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if d.Type()&fs.ModeDevice == 0 {
			return nil
		}
		var st unix.Stat_t
		if err := unix.Lstat(entry, &st); errors.Is(err, unix.ENOENT) {
			return nil
		} else if err != nil {
			return &fs.PathError{Op: "lstat", Path: entry, Err: err}
		}
		list = append(list, Device{LinuxDevice: nodeOf(&st, filepath.Join(container, name))})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list devices at %s: %w", path, err)
	}
	return list, nil
}

func nodeOf(st *unix.Stat_t, path string) specs.LinuxDevice {
	kind := "c"
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		kind = "b"
	}
	mode := os.FileMode(st.Mode & 0o7777)
	uid, gid := st.Uid, st.Gid
	return specs.LinuxDevice{
		Path: path, Type: kind,
		Major: int64(unix.Major(st.Rdev)), Minor: int64(unix.Minor(st.Rdev)),
		FileMode: &mode, UID: &uid, GID: &gid,
	}
}
