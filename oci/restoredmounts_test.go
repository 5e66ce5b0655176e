package oci

import (
	"path/filepath"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/mount"
)

// Each mount of a restored container must be one that its request makes, and be as the request has it.
func TestMountsOfRestoredContainers(t *testing.T) {
	t.Parallel()
	root, err := unix.Open("/", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(root) })
	volume := t.TempDir()
	below := filepath.Join(volume, "below")
	if err := unix.Mkdir(below, 0o700); err != nil {
		t.Fatal(err)
	}
	const rootID, procID, sysID, cgroupID, boundID, otherID, id = 1, 2, 3, 4, 5, 6, 9
	r := restoredMounts{
		spec: &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}},
		root: root,
		all: map[int]mount.Info{
			rootID: {Point: "/", Device: "0:1"}, procID: {Point: "/proc", Device: "0:2"}, sysID: {Point: "/sys", Device: "0:3"},
			cgroupID: {Point: "/sys/fs/cgroup", Device: "0:4"}, boundID: {Point: volume, Device: "0:5"},
		},
		asked: map[int]specs.Mount{
			rootID:   {Destination: "/", Source: "/"},
			procID:   {Destination: "/proc", Type: "proc"},
			sysID:    {Destination: "/sys", Type: "sysfs", Options: []string{"nosuid", "ro"}},
			cgroupID: {Destination: "/sys/fs/cgroup", Type: "cgroup", Options: []string{"ro"}},
			boundID:  {Destination: volume, Type: "bind", Source: volume, Options: []string{"rbind", "rw"}},
			otherID:  {Destination: below, Type: "bind", Source: volume},
		},
		masked: map[int]bool{}, readOnly: map[int]bool{},
	}
	for _, c := range []struct {
		id   int
		m    mount.Info
		why  string // empty: it is one of the request
		mask map[int]bool
	}{
		{rootID, mount.Info{Point: "/", Root: "/", Type: "overlay"}, "", nil},
		{procID, mount.Info{Point: "/proc", Root: "/", Type: "proc"}, "", nil},
		{procID, mount.Info{Point: "/proc", Root: "/", Type: "overlay"}, "and not of proc", nil},
		{procID, mount.Info{Point: "/proc", Root: "/sys", Type: "proc"}, "it shows /sys", nil},
		{sysID, mount.Info{Point: "/sys", Root: "/", Type: "sysfs", Flags: "ro,nosuid", ReadOnly: true}, "", nil},
		{sysID, mount.Info{Point: "/sys", Root: "/", Type: "sysfs", Flags: "rw,nosuid"}, "written to", nil},
		{sysID, mount.Info{Point: "/sys", Root: "/", Type: "sysfs", Flags: "ro", ReadOnly: true}, "not nosuid", nil},
		{cgroupID, mount.Info{Point: "/sys/fs/cgroup", Root: "/", Type: "tmpfs"}, "", nil},
		{cgroupID, mount.Info{Point: "/sys/fs/cgroup", Root: "/", Type: "cgroup2"}, "written to", nil},
		{cgroupID, mount.Info{Point: "/sys/fs/cgroup", Root: "/", Type: "cgroup2", ReadOnly: true}, "", nil},
		{id, mount.Info{Point: "/sys/fs/cgroup/cpu", Root: "/x", Type: "cgroup", ReadOnly: true}, "", nil},
		{id, mount.Info{Point: "/sys/fs/cgroup/cpu", Root: "/x", Type: "cgroup"}, "no mount there", nil},
		{id, mount.Info{Point: "/sys/fs/cgroup/cpu", Root: "/", Type: "tmpfs", ReadOnly: true}, "no mount there", nil},
		{boundID, mount.Info{Point: volume, Root: "/v", Type: "ext4"}, "", nil},
		{otherID, mount.Info{Point: below, Root: "/v", Type: "ext4"}, "it does not show " + volume, nil},
		{id, mount.Info{Point: below, Root: "/", Type: "tmpfs"}, "", nil},
		{id, mount.Info{Point: "/proc/acpi", Root: "/", Type: "tmpfs", ReadOnly: true}, "no mount there", nil},
		{id, mount.Info{Point: "/proc/acpi", Root: "/", Type: "tmpfs", ReadOnly: true}, "", r.masked},
		{id, mount.Info{Point: "/proc/acpi", Root: "/", Type: "overlay", ReadOnly: true}, "no mount there", r.masked},
		{id, mount.Info{Point: "/dev/null", Root: "/null", Type: "devtmpfs"}, "", r.masked},
		{id, mount.Info{Point: "/dev/zero", Root: "/null", Type: "devtmpfs"}, "no mount there", r.masked},
		{id, mount.Info{Point: "/proc/sys", Root: "/sys", Type: "proc", Device: "0:2", ReadOnly: true}, "", r.readOnly},
		{id, mount.Info{Point: "/proc/sys", Root: "/sys", Type: "proc", Device: "0:2"}, "no mount there", r.readOnly},
		{id, mount.Info{Point: "/proc/sys", Root: "/sys", Type: "proc", Device: "0:9", ReadOnly: true}, "no mount there", r.readOnly},
		{id, mount.Info{Point: "/mnt", Root: "/", Type: "ext4", ReadOnly: true}, "no mount there", nil},
		{id, mount.Info{Point: "/dev/console", Root: "/0", Type: "devpts"}, "no mount there", nil},
	} {
		if c.mask != nil {
			c.mask[c.id] = true
		}
		why, err := r.differs(c.id, c.m)
		if err != nil || (why == "") != (c.why == "") || !strings.Contains(why, c.why) {
			t.Errorf("%+v: %q, %v; want %q", c.m, why, err, c.why)
		}
		clear(c.mask)
	}
}
