package spec

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func usernsInput(privileged bool) *Input {
	uids, gids := []*cri.IDMapping{{HostId: 100_000, Length: 65536}}, []*cri.IDMapping{{HostId: 200_000, Length: 65536}}
	in := &Input{Request: Request{
		Pod: &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{UsernsOptions: &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: uids, Gids: gids}},
		}}},
		Container: &cri.ContainerConfig{Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{Privileged: privileged}}},
	}}
	return in
}

// In a user namespace devices are mounted nodes with the owner and mode that they would have elsewhere.
// The node's own devices stay as they are for a privileged container.
func TestDevicesInUserNamespaces_runc_5137_runc_2121(t *testing.T) {
	zero := specs.LinuxDevice{Path: "/dev/zero", Type: "c", Major: 1, Minor: 5}
	other := specs.LinuxDevice{Path: "/dev/full", Type: "c", Major: 1, Minor: 5, FileMode: new(os.FileMode(0o640)), UID: new(uint32(7)), GID: new(uint32(70_000))}
	spec := func() *specs.Spec { return &specs.Spec{Linux: &specs.Linux{Devices: []specs.LinuxDevice{zero, other}}} }

	s, in := spec(), usernsInput(true)
	if taken := TakeDevices(in, s); len(taken) != 1 || taken[0].Path != other.Path || len(s.Linux.Devices) != 1 {
		t.Errorf("privileged: took %+v, left %+v", taken, s.Linux.Devices)
	}
	gone := zero
	gone.Path = "/dev/no-such-device"
	in.Facts.HostDevices = []Device{{LinuxDevice: gone}}
	s = &specs.Spec{Linux: &specs.Linux{Devices: []specs.LinuxDevice{zero, gone}}}
	if taken := TakeDevices(in, s); len(taken) != 0 || len(s.Linux.Devices) != 1 || s.Linux.Devices[0].Path != zero.Path {
		t.Errorf("privileged, when a device of the node has gone: took %+v, left %+v", taken, s.Linux.Devices)
	}
	in.Facts.OwnKernel = true
	if taken := TakeDevices(in, spec()); len(taken) > 0 {
		t.Errorf("of a kernel of its own: %+v", taken)
	}
	if taken := TakeDevices(&Input{Request: Request{Container: in.Request.Container}}, spec()); len(taken) > 0 {
		t.Errorf("without a user namespace: %+v", taken)
	}

	s, in = spec(), usernsInput(false)
	in.Facts.Rootfs = t.TempDir()
	taken, dir := TakeDevices(in, s), t.TempDir()
	if err := MakeDevices(in, s, dir, taken); err != nil || len(taken) != 2 || len(s.Linux.Devices) != 0 || len(s.Mounts) != 2 {
		t.Fatalf("took %+v, mounts %+v, %v", taken, s.Mounts, err)
	}
	for i, want := range []struct{ mode, uid, gid uint32 }{{0o666, 100_000, 200_000}, {0o640, 100_007, 70_000}} {
		m := s.Mounts[i]
		var st unix.Stat_t
		if err := unix.Lstat(m.Source, &st); err != nil || filepath.Dir(m.Source) != dir || m.Destination != taken[i].Path {
			t.Fatalf("%+v: %v", m, err)
		}
		if st.Mode != unix.S_IFCHR|want.mode || st.Rdev != unix.Mkdev(1, 5) || st.Uid != want.uid || st.Gid != want.gid {
			t.Errorf("%s: mode %o, device %x, owner %d:%d", m.Destination, st.Mode, st.Rdev, st.Uid, st.Gid)
		}
	}
	if err := MakeDevices(in, s, dir, []specs.LinuxDevice{{Path: "/dev/x", Type: "regular"}}); err == nil {
		t.Error("a device of an unknown type was made")
	}
}

// Nodes can be made nowhere in /proc, but mounted there. A runtime writes security labels and sysctls to
// such files.
func TestDevicesInUserNamespacesAreNotInProc_CVE_2019_16884_CVE_2025_52881(t *testing.T) {
	in, dir := usernsInput(false), t.TempDir()
	in.Facts.Rootfs = t.TempDir()
	for name, target := range map[string]string{"opt": "/proc/self/attr", "file": "../proc/sysrq-trigger", "fine": "/lib", "dev": "/proc"} {
		if err := os.Symlink(target, filepath.Join(in.Facts.Rootfs, name)); err != nil {
			t.Fatal(err)
		}
	}
	for i, place := range []string{"/proc/self/attr/exec", "proc/x", "/dev/../proc/x", "/proc", "/opt/exec", "/file", "/fine/../opt/x"} {
		s := &specs.Spec{Linux: &specs.Linux{}}
		err := MakeDevices(in, s, dir, []specs.LinuxDevice{{Path: place, Type: "c", Major: 1, Minor: 5}})
		if !errors.Is(err, fault.Invalid) || len(s.Mounts) > 0 {
			t.Errorf("%d: a device at %s: %v", i, place, err)
		}
	}
	s := &specs.Spec{Linux: &specs.Linux{}}
	if err := MakeDevices(in, s, dir, []specs.LinuxDevice{{Path: "/fine/x", Type: "c", Major: 1, Minor: 5}, {Path: "/dev/x", Type: "p"}}); err != nil || len(s.Mounts) != 2 {
		t.Errorf("elsewhere: %+v, %v", s.Mounts, err) // the image's /dev does not count, and is no link
	}
}

// What CDI files and plugins mount with mapped owners is mounted without where that cannot be, and the
// mappings are in the spec only while it is made: a runtime refuses them beside a namespace to join.
func TestMountsWithMappedOwners(t *testing.T) {
	in, options := usernsInput(false), []string{"bind", "ridmap", "ro"}
	made := func() *specs.Spec {
		s := &specs.Spec{Linux: &specs.Linux{}, Mounts: []specs.Mount{
			{Destination: "/driver", Type: "bind", Options: options},
			{Destination: "/volume", Type: "bind", Options: []string{"bind"}, UIDMappings: []specs.LinuxIDMapping{{HostID: 7, Size: 1}}},
		}}
		ShowMappings(in, s)
		return s
	}
	s := made()
	MapOwners(in, s)
	if len(s.Linux.UIDMappings) > 0 || !slices.Equal(s.Mounts[0].Options, options) {
		t.Errorf("without a user namespace: %+v", s)
	}
	in.Facts.Namespaces.User = "/no/such/namespace"
	s = made()
	if u, g := s.Linux.UIDMappings, s.Linux.GIDMappings; len(u) != 1 || u[0].HostID != 100_000 || len(g) != 1 || g[0].HostID != 200_000 {
		t.Errorf("while it is made: users %+v, groups %+v", u, g)
	}
	MapOwners(in, s)
	if len(s.Linux.UIDMappings) > 0 || len(s.Linux.GIDMappings) > 0 {
		t.Errorf("finished: users %+v, groups %+v", s.Linux.UIDMappings, s.Linux.GIDMappings)
	}
	if m := s.Mounts[0]; !slices.Equal(m.Options, []string{"bind", "ro"}) || len(m.UIDMappings) > 0 || options[1] != "ridmap" {
		t.Errorf("by a handler that cannot map owners: %+v", m)
	}
	if m := s.Mounts[1]; len(m.UIDMappings) != 1 || m.UIDMappings[0].HostID != 7 {
		t.Errorf("a volume: %+v", m)
	}
}
