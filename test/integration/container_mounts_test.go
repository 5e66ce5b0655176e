package integration

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
)

func withMounts(mounts ...*cri.Mount) containerChange {
	return func(c *cri.ContainerConfig) { c.Mounts = append(c.Mounts, mounts...) }
}

func TestReadOnlyRootFileSystem(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		volume := w.dir(t)
		c := p.start(t, "sleep", withMounts(&cri.Mount{ContainerPath: "/data", HostPath: volume}),
			func(c *cri.ContainerConfig) { c.Linux.SecurityContext.ReadonlyRootfs = true })
		for _, file := range []string{"/file", "/etc/passwd", "/tmp/file"} {
			if r := c.execResult(t, "write "+file+" x"); r.ExitCode == 0 || !strings.Contains(string(r.Stderr), "read-only") {
				t.Errorf("write %s: code %d, %s", file, r.ExitCode, r.Stderr)
			}
		}
		c.exec(t, "write /data/file x")
		c.exec(t, "write /dev/shm/file x")
		p.start(t, "write /file x").wait(t)
	})
}

func TestRootFileSystemsAreApartAndShortLived(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	a, b := p.start(t, "sleep"), p.start(t, "sleep")
	a.exec(t, "write /etc/motd changed")
	if r := b.execResult(t, "cat /etc/motd"); r.ExitCode == 0 {
		t.Errorf("another container of the image reads %q", r.Stdout)
	}
	a.stop(t, 0)
	a.remove(t)
	if r := p.start(t, "sleep").execResult(t, "cat /etc/motd"); r.ExitCode == 0 {
		t.Errorf("a later container of the image reads %q", r.Stdout)
	}
}

func TestMounts(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		dir := w.dir(t)
		put(t, filepath.Join(dir, "file"), "from the host")
		if err := os.Symlink("file", filepath.Join(dir, "link")); err != nil {
			t.Fatal(err)
		}
		c := p.start(t, "sleep", withMounts(
			&cri.Mount{ContainerPath: "/deep/below/here", HostPath: dir},
			&cri.Mount{ContainerPath: "/deep", HostPath: w.dir(t)}, // shallower, but named later
			&cri.Mount{ContainerPath: "/ro", HostPath: dir, Readonly: true},
			&cri.Mount{ContainerPath: "/etc/one-file", HostPath: filepath.Join(dir, "link")},
		))
		equal(t, "content of a mounted file", c.exec(t, "cat /etc/one-file"), "from the host")
		equal(t, "content below a later mount", c.exec(t, "cat /deep/below/here/file"), "from the host")
		c.exec(t, "write /deep/below/here/new written-inside")
		equal(t, "what the host reads", read(t, filepath.Join(dir, "new")), "written-inside")
		if r := c.execResult(t, "write /ro/file x"); r.ExitCode == 0 {
			t.Error("a read-only mount was written")
		}
		mounts := c.status(t).Mounts
		equal(t, "number of mounts in the status", len(mounts), 4)
		for i, m := range mounts {
			equal(t, "container path in the status", m.ContainerPath, c.config.Mounts[i].ContainerPath)
			equal(t, "host path in the status", m.HostPath, c.config.Mounts[i].HostPath)
			equal(t, "read-only in the status", m.Readonly, c.config.Mounts[i].Readonly)
		}
	})
}

func put(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestMountPropagation(t *testing.T) {
	t.Parallel()
	w := shared(t)
	cases := map[string]struct {
		mode           cri.MountPropagation
		inward         bool // a later mount of the host appears inside
		outward        bool // a mount made inside appears on the host
		needPrivileged bool
	}{
		"private":       {cri.MountPropagation_PROPAGATION_PRIVATE, false, false, false},
		"slave":         {cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER, true, false, false},
		"bidirectional": {cri.MountPropagation_PROPAGATION_BIDIRECTIONAL, true, true, true},
	}
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true })
		for name, c := range cases {
			dir := w.sharedMount(t)
			inner := filepath.Join(dir, "inner")
			if err := os.Mkdir(inner, 0o755); err != nil {
				t.Fatal(err)
			}
			made := p.start(t, "sleep", withMounts(&cri.Mount{ContainerPath: "/data", HostPath: dir, Propagation: c.mode}),
				func(config *cri.ContainerConfig) { config.Linux.SecurityContext.Privileged = c.needPrivileged })
			mountTmpfs(t, inner)
			put(t, filepath.Join(inner, "mark"), "x")
			seen := made.execResult(t, "cat /data/inner/mark").ExitCode == 0
			equal(t, name+": a later mount of the host shows inside", seen, c.inward)

			m := made.facts(t).Mount("/data")
			if m == nil {
				t.Errorf("%s: /data is not mounted", name)
				continue
			}
			shared := slices.ContainsFunc(m.Optional, func(o string) bool { return strings.HasPrefix(o, "shared:") })
			equal(t, name+": mounts made inside show on the host", shared, c.outward)
			made.stop(t, 0)
		}
	})
}

// sharedMount is a directory that is a mount with shared propagation.
func (w *world) sharedMount(t *testing.T) string {
	t.Helper()
	dir := w.dir(t)
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	if err := unix.Mount("", dir, "", unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
	return dir
}

// What every container has is not mounted on the node, too, by a volume that is shared with it.
func TestOwnMountsStayOffTheNode_runc_2404(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		etc := w.sharedMount(t)
		for _, name := range []string{"resolv.conf", "hostname"} {
			put(t, filepath.Join(etc, name), "of the node")
		}
		p := w.run(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true })
		c := p.start(t, "sleep", func(c *cri.ContainerConfig) { c.Linux.SecurityContext.Privileged = true },
			withMounts(&cri.Mount{ContainerPath: "/etc", HostPath: etc, Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL}))
		equal(t, "the file in the container", c.exec(t, "cat /etc/resolv.conf"), "of the node")
		for _, line := range strings.Split(read(t, "/proc/self/mountinfo"), "\n") {
			if strings.Contains(line, " "+etc+"/") {
				t.Errorf("mounted on the node: %s", line)
			}
		}
	})
}

func mountTmpfs(t *testing.T, dir string) {
	t.Helper()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
}

func TestPropagationNeedsASharedSource(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	dir := w.dir(t)
	mountTmpfs(t, dir)
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []cri.MountPropagation{cri.MountPropagation_PROPAGATION_BIDIRECTIONAL, cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER} {
		_, err := p.try(t.Context(), steps("sleep"), withMounts(&cri.Mount{ContainerPath: "/data", HostPath: dir, Propagation: mode}))
		if err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("%v of a private mount: %v", mode, err)
		}
	}
}

func TestStandardMountsAndMaskedPaths(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		f := p.facts(t)
		for point, kind := range map[string]string{
			"/": "overlay", "/proc": "proc", "/dev": "tmpfs", "/dev/pts": "devpts", "/dev/mqueue": "mqueue", "/sys": "sysfs",
		} {
			if m := f.Mount(point); m == nil || m.Type != kind {
				t.Errorf("%s is %+v, want %s", point, m, kind)
			}
		}
		if m := f.Mount("/sys"); m != nil && !slices.Contains(m.Options, "ro") {
			t.Error("/sys is writable")
		}
		for _, path := range []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"} {
			if _, err := os.Stat(path); err == nil && f.Mount(path) == nil {
				t.Errorf("%s is not masked", path)
			}
		}
		for _, path := range []string{"/proc/sys", "/proc/bus", "/proc/irq"} {
			if m := f.Mount(path); m == nil || !slices.Contains(m.Options, "ro") {
				t.Errorf("%s is mounted %+v, want read-only", path, m)
			}
		}
		open := p.facts(t, func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.MaskedPaths, c.Linux.SecurityContext.ReadonlyPaths = nil, nil
		})
		for _, path := range []string{"/proc/keys", "/proc/sys"} {
			if m := open.Mount(path); m != nil {
				t.Errorf("%s is covered by %+v although the request has no such paths", path, m)
			}
		}
	})
}

// An image may have a symbolic link to anywhere as /etc, /dev or the mount's
// target: nothing is ever made or changed outside the root file system.
func TestImageLinksDoNotLeadOutside_CVE_2024_5154(t *testing.T) {
	t.Parallel()
	w := shared(t)
	outside := w.dir(t)
	ref := w.image(t, nil,
		image.Symlink("data", outside),
		image.Symlink("climb", "../../../../../../../.."+outside),
		image.File{Header: image.Whiteout("etc").Header}, image.Symlink("etc", outside))
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		// Such an image may or may not run, but it does no harm.
		c, err := p.try(t.Context(), steps("sleep"), fromImage(ref), withMounts(
			&cri.Mount{ContainerPath: "/data/made", HostPath: w.dir(t)},
			&cri.Mount{ContainerPath: "/climb/made", HostPath: w.dir(t)},
		), func(c *cri.ContainerConfig) { c.WorkingDir = "/data/cwd" })
		if err == nil {
			p.w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id})
		}
		entries, err := os.ReadDir(outside)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			t.Errorf("%s was made outside the container", filepath.Join(outside, e.Name()))
		}
	})
}

// A node that makes all root file systems read-only leaves programs room in memory, with what the image
// has there.
func TestReadOnlyNodeLeavesRoom(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[pod]\nread_only = true\n"})
	ref := w.image(t, nil, image.Text("run/of-the-image", "kept"), image.Symlink("var/tmp", "/scratch/tmp")) // runc#2683
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep", ofImage(ref))
		c.cannotWrite(t, "/file", "/etc/file")
		for _, file := range []string{"/run/file", "/tmp/file", "/var/tmp/file"} {
			c.exec(t, "write "+file+" x")
		}
		equal(t, "file of the image", c.exec(t, "cat /run/of-the-image"), "kept")
	})
}
