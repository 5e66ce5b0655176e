package integration

import (
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
