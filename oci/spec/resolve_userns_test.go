package spec

import (
	"os"
	"path/filepath"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func usernsInput(privileged bool) *Input {
	ids := []*cri.IDMapping{{HostId: 100_000, Length: 65536}}
	in := &Input{Request: Request{
		Pod: &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{UsernsOptions: &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: ids, Gids: ids}},
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
	in.Facts.OwnKernel = true
	if taken := TakeDevices(in, spec()); len(taken) > 0 {
		t.Errorf("of a kernel of its own: %+v", taken)
	}
	if taken := TakeDevices(&Input{Request: Request{Container: in.Request.Container}}, spec()); len(taken) > 0 {
		t.Errorf("without a user namespace: %+v", taken)
	}

	s, in = spec(), usernsInput(false)
	taken, dir := TakeDevices(in, s), t.TempDir()
	if err := MakeDevices(in, s, dir, taken); err != nil || len(taken) != 2 || len(s.Linux.Devices) != 0 || len(s.Mounts) != 2 {
		t.Fatalf("took %+v, mounts %+v, %v", taken, s.Mounts, err)
	}
	for i, want := range []struct{ mode, uid, gid uint32 }{{0o666, 100_000, 100_000}, {0o640, 100_007, 70_000}} {
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
