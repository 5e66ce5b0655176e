package integration

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestDevices(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "sleep", func(c *cri.ContainerConfig) {
			c.Devices = []*cri.Device{
				{HostPath: "/dev/loop-control", ContainerPath: "/dev/renamed", Permissions: "r"},
				{HostPath: "/dev/fuse", ContainerPath: "/dev/fuse", Permissions: "rw"},
			}
		})
		c.exec(t, "open /dev/renamed r")
		c.exec(t, "open /dev/fuse rw")
		if r := c.execResult(t, "open /dev/renamed w"); r.ExitCode == 0 {
			t.Error("a device for reading was opened for writing")
		}
		for _, device := range []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"} {
			if r := c.execResult(t, "stat "+device); r.ExitCode != 0 {
				t.Errorf("no %s", device)
			}
		}
		for _, device := range []string{"/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/loop-control"} {
			if r := c.execResult(t, "stat "+device); r.ExitCode == 0 {
				t.Errorf("%s is there without having been asked for", device)
			}
		}
	})
}

// Device plugins ask for directories, and several may ask for one path. An update of limits takes no
// device away and opens none.
func TestDevicesOutliveUpdates_singularity_cri_352_nvidia_docker_1730(t *testing.T) {
	t.Parallel()
	w := shared(t)
	dir := w.dir(t)
	bus := filepath.Join(dir, "bus", "001")
	must(t, os.Mkdir(filepath.Dir(bus), 0o755))
	must(t, unix.Mknod(bus, unix.S_IFCHR, int(unix.Mkdev(1, 5)))) // like /dev/zero
	must(t, errors.Join(os.Chown(bus, 107, 108), os.Chmod(bus, 0o640)))
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep", func(c *cri.ContainerConfig) {
			c.Devices = []*cri.Device{
				{HostPath: dir, ContainerPath: "/dev/usb", Permissions: "rw"},
				{HostPath: "/dev/fuse", ContainerPath: "/dev/twice", Permissions: "r"},
				{HostPath: "/dev/loop-control", ContainerPath: "/dev/twice", Permissions: "rw"},
			}
		})
		for range 2 {
			if got := c.exec(t, "stat /dev/usb/bus/001"); !strings.HasPrefix(got, "20640 107 108") {
				t.Errorf("mode and owner are %s", got)
			}
			c.exec(t, "open /dev/usb/bus/001 rw")
			c.exec(t, "open /dev/twice rw")
			if r := c.execResult(t, "open /dev/usb/bus/001 rw ; open /dev/kmsg r"); r.ExitCode == 0 {
				t.Error("a device that was not asked for is open")
			}
			_, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{
				ContainerId: c.id, Linux: &cri.LinuxContainerResources{MemoryLimitInBytes: 96 * mib, CpuShares: 300, CpusetCpus: "0"},
			})
			must(t, err)
		}
	})
}

// A privileged container has the device under the name that was asked for, and no masks, also if a
// request has some. With the node's /dev and a terminal it leaves that as it is.
func TestDevicesOfPrivilegedContainers_moby_35991_moby_19464(t *testing.T) {
	t.Parallel()
	w := shared(t)
	privileged := func(c *cri.ContainerConfig) { c.Linux.SecurityContext.Privileged = true }
	nodes := func() (list []unix.Stat_t) {
		for _, path := range []string{"/dev/ptmx", "/dev/pts/ptmx", "/dev/null", "/dev/tty", "/dev/shm"} {
			var st unix.Stat_t
			must(t, unix.Lstat(path, &st))
			list = append(list, unix.Stat_t{Mode: st.Mode, Uid: st.Uid, Gid: st.Gid, Rdev: st.Rdev})
		}
		return list
	}
	before := nodes()
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true })
		c := p.start(t, "sleep", privileged, func(c *cri.ContainerConfig) {
			c.Devices = []*cri.Device{{HostPath: "/dev/fuse", ContainerPath: "/dev/renamed", Permissions: "rw"}}
		})
		c.exec(t, "open /dev/renamed rw ; open /dev/fuse rw")
		if m := c.facts(t).Mount("/proc/kcore"); m != nil {
			t.Errorf("masked: %+v", m)
		}
		p.start(t, "sleep", privileged, withMounts(&cri.Mount{ContainerPath: "/dev", HostPath: "/dev"}), func(c *cri.ContainerConfig) { c.Tty = true })
	})
	if after := nodes(); !slices.Equal(before, after) {
		t.Errorf("the node's devices were %+v and are %+v", before, after)
	}
}

func TestMissingDeviceIsRefused(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	for _, path := range []string{"/dev/no-such-device", "/etc/passwd"} {
		_, err := p.try(t.Context(), steps("sleep"), func(c *cri.ContainerConfig) {
			c.Devices = []*cri.Device{{HostPath: path, ContainerPath: "/dev/x", Permissions: "rwm"}}
		})
		if err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("device %s: %v", path, err)
		}
	}
}

func TestPrivileged(t *testing.T) {
	t.Parallel()
	w := shared(t)
	all := ownBounding(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true })
		privileged := func(c *cri.ContainerConfig) {
			s := c.Linux.SecurityContext
			s.Privileged, s.MaskedPaths, s.ReadonlyPaths = true, nil, nil
		}
		c := p.start(t, "sleep", privileged)
		f := c.facts(t)
		equal(t, "effective capabilities", f.Caps.Effective, all)
		equal(t, "seccomp mode", f.Seccomp, 0)
		if m := f.Mount("/sys"); m == nil || slices.Contains(m.Options, "ro") {
			t.Errorf("/sys is %+v, want it writable", m)
		}
		if m := f.Mount("/proc/kcore"); m != nil {
			t.Error("/proc/kcore is masked")
		}
		for _, device := range []string{"/dev/kmsg", "/dev/mem", "/dev/fuse"} {
			if unix.Access(device, unix.F_OK) == nil {
				c.exec(t, "stat "+device)
			}
		}
		c.exec(t, "open /dev/kmsg r")

		as := p.facts(t, privileged, func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1001}
		})
		equal(t, "effective capabilities of a user", as.Caps.Effective, 0)
	})
}

func TestPrivilegedContainerNeedsAPrivilegedPod(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	_, err := p.try(t.Context(), steps("sleep"), func(c *cri.ContainerConfig) { c.Linux.SecurityContext.Privileged = true })
	if err == nil || !strings.Contains(err.Error(), "privileged") {
		t.Errorf("got %v", err)
	}
}
