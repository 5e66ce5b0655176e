package integration

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images/facts"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// Vulnerabilities of OCI runtimes: crius's calls of a runtime must not lead to
// them. A distribution's runc may lack some fixes (crius warns about that), so
// a current one replaces it here.
var modern = scene.Commons{Prepare: func(ctx context.Context) (node.Options, error) {
	runc, err := tools.Runc(ctx)
	return node.Options{Config: "[runtime.handlers.runc]\npath = \"" + runc + "\"\n"}, err
}}

// fixed is a node, shared as well, whose handler runc is a current runc.
func fixed(t *testing.T) *world {
	t.Helper()
	return known(modern.World(t))
}

// begin creates and starts a container that need not run: nil if it does not.
func (p *pod) begin(t *testing.T, line string, change ...containerChange) *container {
	t.Helper()
	c, err := p.try(t.Context(), steps(line), change...)
	if err == nil {
		_, err = p.w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id})
	}
	if err != nil {
		t.Logf("refused: %v", err)
		return nil
	}
	return c
}

// empty checks that nothing was made in a directory of the node.
func empty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		t.Errorf("%s was made outside the container", filepath.Join(dir, e.Name()))
	}
}

// A process of the container keeps the programs open that join it, and writes
// to them as soon as they have ended. Commands and the container's own program
// are the runtime itself, as far as the container can choose that.
func TestRuntimeIsNotOverwritten_CVE_2019_5736(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		before := digestOf(t, handler)
		files := append(librariesOf(t, handler), image.Regular("trap", 0o755, []byte("#!/proc/self/exe\n")))
		ref := w.image(t, nil, files...)
		p := w.run(t, handler)
		p.begin(t, "", func(c *cri.ContainerConfig) { c.Command = []string{"/proc/self/exe"} })
		p.begin(t, "", fromImage(ref), func(c *cri.ContainerConfig) { c.Command = []string{"/trap"} })
		c := p.start(t, "", fromImage(ref), func(c *cri.ContainerConfig) { c.Args = steps("fifo /tmp/held ; overwrite") })
		c.says(t, "ready")
		command := func(ctx context.Context, cmd ...string) error {
			_, err := w.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: c.id, Cmd: cmd, Timeout: scene.LimitSeconds})
			return err
		}
		for range 3 { // which are short, so that the container may miss them
			for _, cmd := range []string{"/trap", "/proc/self/exe"} {
				if err := command(t.Context(), cmd); err != nil {
					t.Logf("%s: %v", cmd, err)
				}
			}
		}
		// One that waits for the other end of a named pipe until it is killed.
		waits := map[string][]string{"runc": {"--log", "/tmp/held", "list"}, "crun": {"update", "--resources", "/tmp/held", "none"}}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- command(ctx, append([]string{"/proc/self/exe"}, waits[handler]...)...) }()
		c.only(t, 2)
		c.says(t, "sees")
		cancel()
		_ = scene.Receive(t, "the command to end", ended)
		wait.For(t, "the container to write to the runtime", func() bool {
			said := c.output(t)
			return strings.Count(said, "sees") == strings.Count(said, "kept")+strings.Count(said, "written")
		})
		c.stop(t, 0)
		if strings.Contains(c.output(t), "written") {
			t.Errorf("the container wrote to a program of the node: %s", c.output(t))
		}
		equal(t, "digest of "+handler, digestOf(t, handler), before)
	})
}

// librariesOf returns the libraries that a program needs in a container.
func librariesOf(t *testing.T, program string) (files []image.File) {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Fatal(err)
	}
	out, _ := exec.CommandContext(t.Context(), "ldd", path).Output() // fails for a static program
	for _, word := range strings.Fields(string(out)) {
		if !filepath.IsAbs(word) {
			continue
		}
		file, err := image.HostFile(word[1:], word, 0o755)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	return files
}

func digestOf(t *testing.T, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(data))
}

// The places of the kernel's file systems are links in the image: to a
// directory of the image that looks like /proc, and to one of the node.
func TestImageKernelDirectoriesAreNoLinks_CVE_2019_19921_CVE_2023_27561_CVE_2023_28642_CVE_2024_5154_CVE_2026_41579_CVE_2026_47766(t *testing.T) {
	t.Parallel()
	w := shared(t)
	outside := w.dir(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for _, name := range []string{"proc", "sys", "dev"} {
			for _, target := range []string{outside, "/elsewhere", "../../../../../../../.." + outside} {
				ref := w.image(t, nil, image.Dir("elsewhere"), image.Dir("elsewhere/self"), image.Dir("elsewhere/self/attr"), image.Symlink(name, target))
				if c := p.begin(t, "sleep", fromImage(ref)); c != nil {
					t.Errorf("an image whose /%s leads to %s runs", name, target)
				}
				empty(t, outside)
			}
		}
	})
}

// An image's volume at /proc is ignored, and a mount over it is refused or
// leaves the kernel's file system in force.
func TestProcIsTheKernels_CVE_2019_16884(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.image(t, func(c *imagespec.ImageConfig) {
		c.Volumes = map[string]struct{}{"/proc": {}, "/proc/self/attr": {}, "/sys": {}}
	}, image.Dir("proc"), image.Dir("proc/self"), image.Text("proc/self/false", "x"), image.Symlink("alias", "/proc/self"))
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		f := p.facts(t, fromImage(ref), func(c *cri.ContainerConfig) { c.Args = []string{"facts"} })
		for _, m := range f.Mounts {
			if m.Point == "/proc" && m.Type != "proc" || strings.HasPrefix(m.Point, "/proc/self") {
				t.Errorf("with volumes of the image at /proc there is %+v", m)
			}
		}
		for _, target := range []string{"/proc", "/proc/self/attr", "/proc/../proc", "/alias/attr"} {
			dir := w.dir(t)
			if c := p.begin(t, "sleep", fromImage(ref), withMounts(&cri.Mount{ContainerPath: target, HostPath: dir})); c != nil {
				t.Errorf("a directory of the node is mounted at %s: %v", target, c.facts(t).Mounts)
			}
		}
	})
}

// A volume has links into /proc, on whose targets other volumes are to be
// mounted: by the container's own path or by one of its files.
func TestLinksOfVolumesDoNotLeadIntoProc_CVE_2019_16884_CVE_2019_19921(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		volume := w.dir(t)
		for name, target := range map[string]string{"proc": "/proc", "self": "../proc/self", "kernel": "/proc/sys/kernel"} {
			if err := os.Symlink(target, filepath.Join(volume, name)); err != nil {
				t.Fatal(err)
			}
		}
		for _, target := range []string{"/volume/self/attr", "/volume/kernel", "/volume/proc/sys", "/volume/proc/self/fdinfo"} {
			c := p.begin(t, "sleep", withMounts(
				&cri.Mount{ContainerPath: "/volume", HostPath: volume}, &cri.Mount{ContainerPath: target, HostPath: w.dir(t)},
			))
			if c != nil {
				t.Errorf("a volume is mounted at %s: %v", target, c.facts(t).Mounts)
			}
		}
		// Mounts of the kubelet and of privileged pods are not refused.
		for _, target := range []string{"/proc", "/node"} {
			c := p.start(t, "sleep", withMounts(&cri.Mount{ContainerPath: target, HostPath: "/proc"}))
			c.stop(t, 0)
		}
	})
}

// While a container starts, its neighbour replaces the directory in their
// shared volume on which another volume will be mounted with a link that leads
// out.
func TestMountsBesideSwappedLinks_CVE_2021_30465_CVE_2024_45310(t *testing.T) {
	t.Parallel()
	w := fixed(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		outside, volume, inner := w.dir(t), w.dir(t), w.dir(t)
		swap(t, volume, outside)
		ran := 0
		for range 30 {
			c := p.begin(t, "sleep", withMounts(
				&cri.Mount{ContainerPath: "/volume", HostPath: volume},
				&cri.Mount{ContainerPath: "/volume/place/deep", HostPath: inner},
			))
			empty(t, outside)
			if c == nil {
				continue
			}
			ran++
			mounted := slices.ContainsFunc(c.facts(t).Mounts, func(m facts.Mount) bool { return strings.HasSuffix(inner, m.Root) && m.Root != "/" })
			equal(t, "the inner volume is in the container", mounted, true)
			c.stop(t, 0)
			c.remove(t)
		}
		t.Logf("%d of 30 containers ran", ran)
	})
}

// swap exchanges a directory called place for a link to target, and back, until
// the test ends.
func swap(t *testing.T, dir, target string) {
	t.Helper()
	place, link := filepath.Join(dir, "place"), filepath.Join(dir, "link")
	if err := os.Mkdir(place, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if err := unix.Renameat2(unix.AT_FDCWD, place, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	t.Cleanup(func() { stop(); <-done })
}

// The sources that a runtime binds over masked paths, and the console, come
// from a /dev that the container's neighbour has prepared.
func TestMasksAndConsoleAreNotRedirected_CVE_2025_31133_CVE_2025_52565_CVE_2025_52881(t *testing.T) {
	t.Parallel()
	w := fixed(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler, func(c *cri.PodSandboxConfig) {
			c.Linux.Sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "81"}
		})
		for name, files := range map[string]map[string]string{
			"null":    {"null": "/proc/sys/kernel/core_pattern"},
			"console": {"console": "/proc/sys/kernel/core_pattern", "pts/0": "/proc/sysrq-trigger"},
			"all":     {"null": "/proc/sysrq-trigger", "console": "/proc/sysrq-trigger", "ptmx": "/proc/sysrq-trigger", "fd": "/proc/sys"},
		} {
			dev := w.dir(t)
			for file, target := range files {
				if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(dev, file)), 0o755), os.Symlink(target, filepath.Join(dev, file))); err != nil {
					t.Fatal(err)
				}
			}
			c := p.begin(t, "sleep", withMounts(&cri.Mount{ContainerPath: "/dev", HostPath: dev}), func(c *cri.ContainerConfig) { c.Tty = true })
			if c == nil {
				continue
			}
			for _, m := range c.facts(t).Mounts {
				if strings.HasSuffix(m.Root, "core_pattern") || strings.HasSuffix(m.Root, "sysrq-trigger") && m.Point != "/proc/sysrq-trigger" {
					t.Errorf("%s: a file of /proc is mounted: %+v", name, m)
				}
			}
			for _, file := range []string{"/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"} {
				if r := c.execResult(t, "open "+file+" w"); r.ExitCode == 0 {
					t.Errorf("%s: %s can be written", name, file)
				}
			}
		}
		for _, target := range []string{"/proc/self/attr", "/proc/sys/net/ipv4", "/proc/thread-self/attr"} {
			if c := p.begin(t, "sleep", withMounts(&cri.Mount{ContainerPath: target, HostPath: w.dir(t)})); c != nil {
				t.Errorf("a directory of the node is mounted at %s", target)
			}
		}
	})
}

// A container may read its cgroups, but not change them.
func TestCgroupsAreReadOnly_CVE_2023_25809(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		seen := 0
		for _, m := range c.facts(t).Mounts {
			if m.Type != "cgroup" && m.Type != "cgroup2" {
				continue
			}
			seen++
			if !slices.Contains(m.Options, "ro") {
				t.Errorf("%s is mounted %v", m.Point, m.Options)
			}
			if r := c.execResult(t, "write "+m.Point+"/cgroup.procs 1"); r.ExitCode == 0 {
				t.Errorf("%s/cgroup.procs can be written", m.Point)
			}
		}
		if seen == 0 {
			t.Error("the container has no cgroup mount")
		}
	})
}
