package oci

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
)

func TestMountsThatLinksOfVolumesLeadAstray_CVE_2019_16884_CVE_2025_31133_CVE_2025_52565(t *testing.T) {
	t.Parallel()
	proc := specs.Mount{Destination: "/proc", Type: "proc", Source: "proc"}
	own := &specs.Spec{
		Mounts: []specs.Mount{proc, {Destination: "/dev", Type: "tmpfs"}, {Destination: "/proc/cpuinfo", Type: "bind", Source: "/lxcfs/cpuinfo"}},
		Linux:  &specs.Linux{MaskedPaths: []string{"/proc/kcore", "/proc/asound"}, ReadonlyPaths: []string{"/proc/sys"}},
	}
	node := &specs.Spec{Mounts: []specs.Mount{{Destination: "/proc", Type: "bind", Source: "/proc"}}, Linux: &specs.Linux{}}
	for _, c := range []struct {
		spec              *specs.Spec
		point, kind, root string
		ok                bool
	}{
		{own, "/", "overlay", "/", true},
		{own, "/proc", "proc", "/", true},
		{own, "/proc/sys", "proc", "/sys", true},
		{own, "/proc/kcore", "devtmpfs", "/null", true},
		{own, "/proc/asound", "tmpfs", "/", true},
		{own, "/proc/cpuinfo", "fuse.lxcfs", "/proc/cpuinfo", true},
		{own, "/proc/sys/fs/binfmt_misc", "autofs", "/", true},
		{own, "/dev/console", "devpts", "/0", true},
		{own, "/volume", "ext4", "/x", true},
		{own, "/host/proc/sys", "proc", "/sys", true},
		{own, "/proc/sys", "ext4", "/x", false},
		{own, "/proc/1/attr", "ext4", "/x", false},
		{own, "/proc/sys/kernel", "tmpfs", "/", false},
		{own, "/proc/sys/net", "proc", "/sys/net", false},
		{own, "/proc/kcore", "proc", "/sys/kernel/core_pattern", false},
		{own, "/dev/console", "proc", "/sys/kernel/core_pattern", false},
		{node, "/proc/sys/kernel", "tmpfs", "/", true},
	} {
		err := checkMount(mount.Info{Point: c.point, Type: c.kind, Root: c.root}, c.spec)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, fault.Invalid) {
			t.Errorf("%s of %s at %s: %v", c.root, c.kind, c.point, err)
		}
	}
	if err := checkCreated(os.Getpid(), node); err != nil {
		t.Errorf("the mounts of this process: %v", err)
	}
	if err := checkCreated(1<<30, node); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no process: %v", err)
	}
}

// What a mask should hide is there on this node alone: criu has nothing to restore over it.
func TestMasksOfRestoredContainers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	missing := filepath.Join(dir, "missing")
	for what, c := range map[string]struct {
		l    specs.Linux
		want error
	}{
		"missing":                {specs.Linux{MaskedPaths: []string{missing}, ReadonlyPaths: []string{missing}}, nil},
		"not masked":             {specs.Linux{MaskedPaths: []string{dir}}, fault.Precondition},
		"writable":               {specs.Linux{ReadonlyPaths: []string{dir}}, fault.Precondition},
		"missing and not masked": {specs.Linux{MaskedPaths: []string{missing, dir}}, fault.Precondition},
	} {
		if err := checkMasks(os.Getpid(), &c.l); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := mount.Shm(dir, 1<<20, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mount.Unmount(dir) })
	if err := checkMasks(os.Getpid(), &specs.Linux{MaskedPaths: []string{dir}}); err != nil {
		t.Errorf("masked: %v", err)
	}
	if err := checkMasks(os.Getpid(), &specs.Linux{ReadonlyPaths: []string{dir}}); !errors.Is(err, fault.Precondition) {
		t.Errorf("a writable mount: %v", err)
	}
}
