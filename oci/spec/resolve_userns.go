package spec

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/mount"
)

// What others add to the spec of a container, CDI files and plugins, says nothing of user namespaces.
// The functions here make it what it is in other containers.

// TakeDevices removes from the spec of a container in a user namespace the device nodes that
// MakeDevices must make, and returns them. Nobody can make nodes in a user namespace: a runtime mounts
// what the node has at the path that the device has in the container, which may be nothing or another
// device, and belongs to users whom the container does not have.
//
// A privileged container has all of the node's devices, and keeps those as the runtime mounts them:
// owning them, its root would have the rights of the node's. For the same reason it does not get those
// that have gone since they were listed: another device may get their numbers.
func TakeDevices(in *Input, s *specs.Spec) (taken []specs.LinuxDevice) {
	if !ownUserNamespace(in.Request.Pod) || in.Facts.OwnKernel {
		return nil
	}
	s.Linux.Devices = slices.DeleteFunc(s.Linux.Devices, func(d specs.LinuxDevice) bool {
		switch {
		case in.privileged() && onNode(d):
			return false
		case in.privileged() && in.listed(d):
			return true
		}
		taken = append(taken, d)
		return true
	})
	return taken
}

// listed reports whether a device is one of those that the node had for privileged containers.
func (in *Input) listed(d specs.LinuxDevice) bool {
	return slices.ContainsFunc(in.Facts.HostDevices, func(known Device) bool {
		return known.Path == d.Path && known.Type == d.Type && known.Major == d.Major && known.Minor == d.Minor
	})
}

// MakeDevices makes the nodes in dir, for the users of the container, and mounts them. Something must
// be mounted at dir on which nodes can be used. A device that would be mounted in /proc is
// fault.Invalid.
func MakeDevices(in *Input, s *specs.Spec, dir string, nodes []specs.LinuxDevice) error {
	users := in.podSecurity().GetNamespaceOptions().GetUsernsOptions()
	for i, d := range nodes {
		if err := checkDevicePath(in.Facts.Rootfs, d.Path); err != nil {
			return fmt.Errorf("device at %q: %w", d.Path, err)
		}
		source := filepath.Join(dir, strconv.Itoa(i))
		kind, known := nodeKinds[d.Type]
		if !known {
			return invalid("device %s has the unknown type %.10q", d.Path, d.Type)
		}
		mode, uid, gid := os.FileMode(0o666), uint32(0), uint32(0)
		if d.FileMode != nil {
			mode = d.FileMode.Perm()
		}
		if d.UID != nil {
			uid = *d.UID
		}
		if d.GID != nil {
			gid = *d.GID
		}
		err := os.NewSyscallError("mknod", unix.Mknod(source, kind, int(numberOf(d))))
		if err == nil {
			err = errors.Join(os.Chown(source, nodeID(users.GetUids(), uid), nodeID(users.GetGids(), gid)), os.Chmod(source, mode))
		}
		if err != nil {
			return fmt.Errorf("make device %s: %w", d.Path, err)
		}
		s.Mounts = append(s.Mounts, specs.Mount{
			Destination: d.Path, Type: "bind", Source: source, Options: []string{"bind", "rprivate", "nosuid", "rw"}, // programs are mapped from /dev/sgx_enclave
		})
	}
	return nil
}

// checkDevicePath refuses what CheckRootfs refuses of other mounts. What is below /dev is never the
// image's.
func checkDevicePath(rootfs, place string) error {
	place = path.Join("/", place)
	if atOrBelow(place, []string{"/proc", "/dev"}) {
		return validateProcMount(place, "")
	}
	return checkLinks(rootfs, place, "")
}

var nodeKinds = map[string]uint32{"c": unix.S_IFCHR, "u": unix.S_IFCHR, "b": unix.S_IFBLK, "p": unix.S_IFIFO}

func numberOf(d specs.LinuxDevice) uint64 { return unix.Mkdev(uint32(d.Major), uint32(d.Minor)) }

// onNode reports whether the node has the device at the same path.
func onNode(d specs.LinuxDevice) bool {
	var st unix.Stat_t
	return unix.Lstat(d.Path, &st) == nil && st.Mode&unix.S_IFMT == nodeKinds[d.Type] && st.Rdev == numberOf(d)
}

// ShowMappings writes the mappings of the user namespace that the container joins into its spec, until
// MapOwners: CDI asks for mapped owners in its mounts only if it finds them there.
func ShowMappings(in *Input, s *specs.Spec) {
	if in.Facts.Namespaces.User == "" {
		return
	}
	users := in.podSecurity().GetNamespaceOptions().GetUsernsOptions()
	s.Linux.UIDMappings, s.Linux.GIDMappings = idMappings(users.GetUids()), idMappings(users.GetGids())
}

// MapOwners gives mounts with the option idmap or ridmap the mappings of the user namespace that the
// container joins, as volumes have them. A file system that does not support that is mounted without, and
// shows its files as nobody's.
func MapOwners(in *Input, s *specs.Spec) {
	users := in.Facts.Namespaces.User
	if users == "" {
		return
	}
	uids, gids := s.Linux.UIDMappings, s.Linux.GIDMappings
	s.Linux.UIDMappings, s.Linux.GIDMappings = nil, nil // which a runtime refuses beside a namespace to join
	mapping := func(option string) bool { return option == "idmap" || option == "ridmap" }
	for i := range s.Mounts {
		m := &s.Mounts[i]
		if len(m.UIDMappings) > 0 || !slices.ContainsFunc(m.Options, mapping) {
			continue
		}
		m.Options = slices.DeleteFunc(slices.Clone(m.Options), mapping)
		if in.Facts.IDMap && mount.CanMap(users, m.Source) {
			m.UIDMappings, m.GIDMappings = uids, gids
		}
	}
}
