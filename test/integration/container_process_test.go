package integration

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images/facts"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/scene"
)

// fromImage runs an image's own entry point and arguments, unless change says
// otherwise.
func fromImage(ref string) containerChange {
	return func(c *cri.ContainerConfig) { c.Image.Image, c.Args = ref, nil }
}

func TestCommandAndArgsMergeWithTheImage(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.image(t, func(c *imagespec.ImageConfig) {
		c.Entrypoint, c.Cmd = []string{"/probe", "echo", "entry", ";", "facts"}, []string{";", "echo", "cmd"}
	})
	plain := w.image(t, func(c *imagespec.ImageConfig) { c.Entrypoint, c.Cmd = nil, []string{"/probe", "facts"} })
	cases := map[string]struct {
		image         string
		command, args []string
		want          []string
	}{
		"nothing given":    {ref, nil, nil, []string{"/probe", "echo", "entry", ";", "facts", ";", "echo", "cmd"}},
		"args only":        {ref, nil, []string{";", "echo", "given"}, []string{"/probe", "echo", "entry", ";", "facts", ";", "echo", "given"}},
		"command only":     {ref, []string{"/probe", "facts"}, nil, []string{"/probe", "facts"}},
		"command and args": {ref, []string{"/probe", "facts"}, []string{";", "echo", "x"}, []string{"/probe", "facts", ";", "echo", "x"}},
		"cmd of the image": {plain, nil, nil, []string{"/probe", "facts"}},
		"from PATH":        {plain, []string{"probe"}, []string{"facts"}, []string{"probe", "facts"}},
	}
	p := w.run(t, "runc")
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			made := p.start(t, "", fromImage(c.image), func(config *cri.ContainerConfig) { config.Command, config.Args = c.command, c.args })
			if s := made.wait(t); s.ExitCode != 0 {
				t.Fatalf("ended with %d", s.ExitCode)
			}
			equalSlices(t, "argv", lastFacts(t, made).Args, c.want)
		})
	}
}

// lastFacts finds the facts among a container's output lines.
func lastFacts(t *testing.T, c *container) *facts.Facts {
	t.Helper()
	for _, r := range c.log(t) {
		if len(r.Content) > 0 && r.Content[0] == '{' && !r.Partial {
			f, err := facts.Parse([]byte(r.Content))
			if err != nil {
				t.Fatal(err)
			}
			return f
		}
	}
	t.Fatalf("no facts in %q", c.output(t))
	return nil
}

func TestEnvironmentMergesWithTheImage(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.image(t, func(c *imagespec.ImageConfig) {
		c.Env = []string{"PATH=/bin:/", "KEPT=image", "CHANGED=image", "EMPTY=", "EQUALS=a=b=c", "NOVALUE", "=noname", "TWICE=first", "TWICE=last"}
	})
	f := w.run(t, "crun").facts(t, func(c *cri.ContainerConfig) {
		c.Image.Image = ref
		c.Envs = []*cri.KeyValue{
			{Key: "CHANGED", Value: []byte("request")},
			{Key: "ADDED", Value: []byte("two words\nand a line")},
			{Key: "NOTHING", Value: nil},
		}
	})
	want := map[string]string{
		"PATH": "/bin:/", "KEPT": "image", "CHANGED": "request", "EMPTY": "", "EQUALS": "a=b=c",
		"ADDED": "two words\nand a line", "NOTHING": "", "HOME": "/root", "TWICE": "last",
	}
	for name, value := range want {
		if got, ok := f.Getenv(name); !ok || got != value {
			t.Errorf("%s is %q (set: %v), want %q", name, got, ok, value)
		}
	}
	names := map[string]int{}
	for _, e := range f.Env {
		name, _, _ := strings.Cut(e, "=")
		names[name]++
	}
	for name, want := range map[string]int{"CHANGED": 1, "TWICE": 1, "NOVALUE": 0, "": 0} {
		equal(t, fmt.Sprintf("number of assignments to %q", name), names[name], want)
	}
}

// How a program is found: with a slash below the working directory, otherwise in PATH, which an
// image need not set; by commands as well.
func TestProgramsAreFoundAsByDocker_podman_4429_containerd_3663(t *testing.T) {
	t.Parallel()
	w := shared(t)
	files := []image.File{image.Dir("bin"), image.Symlink("bin/linked", "/probe"), image.Dir("app"), image.Symlink("app/here", "/probe")}
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for program, env := range map[string][]string{
			"./here": {"PATH=/bin"}, "../bin/linked": nil, "linked": nil, "/probe": {"PATH="},
		} {
			ref := w.image(t, func(c *imagespec.ImageConfig) {
				c.Entrypoint, c.Cmd, c.Env, c.WorkingDir = []string{program}, []string{"sleep"}, env, "/app"
			}, files...)
			c := p.start(t, "", fromImage(ref))
			resp, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{program, "echo", "found"}, Timeout: scene.LimitSeconds})
			if err != nil || string(resp.Stdout) != "found\n" {
				t.Errorf("%s with %q: %v, %v", program, env, resp, err)
			}
		}
	})
}

// One container's environment must never appear in another of the same image.
func TestEnvironmentsDoNotMix_CVE_2021_21334(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	env := func(name string) containerChange {
		return func(c *cri.ContainerConfig) { c.Envs = []*cri.KeyValue{{Key: name, Value: []byte("x")}} }
	}
	a, b := p.create(t, "facts", env("ONLY_A")), p.create(t, "facts", env("ONLY_B"))
	for c, foreign := range map[*container]string{a: "ONLY_B", b: "ONLY_A"} {
		c.start(t)
		c.wait(t)
		if _, ok := lastFacts(t, c).Getenv(foreign); ok {
			t.Errorf("a container sees %s of the other", foreign)
		}
	}
}

func TestWorkingDirectory(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.image(t, func(c *imagespec.ImageConfig) { c.WorkingDir = "/home/app" })
	p := w.run(t, "crun")
	cwd := func(image, dir string) string {
		return p.facts(t, func(c *cri.ContainerConfig) { c.Image.Image, c.WorkingDir = image, dir }).Cwd
	}
	equal(t, "default", cwd(probe, ""), "/")
	equal(t, "the image's", cwd(ref, ""), "/home/app")
	equal(t, "the request's", cwd(ref, "/tmp"), "/tmp")
	equal(t, "one that is missing", cwd(ref, "/made/for/this"), "/made/for/this")
}

// For an input that stays open see attach_test.go.
func TestStandardInputIsEmptyUnlessAskedFor(t *testing.T) {
	t.Parallel()
	equal(t, "output", shared(t).run(t, "crun").finish(t, "cat ; echo end"), "end\n")
}

func TestTerminal(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "tty ; facts ; echo -err to-stderr", func(c *cri.ContainerConfig) { c.Tty, c.Stdin = true, true })
		if s := c.wait(t); s.ExitCode != 0 {
			t.Fatalf("ended with %d: %s", s.ExitCode, c.output(t))
		}
		for _, r := range c.log(t) {
			equal(t, "stream of a terminal's output", r.Stream, "stdout")
		}
		if !slices.ContainsFunc(c.log(t), func(r kubelet.LogRecord) bool { return r.Content == "to-stderr\r" || r.Content == "to-stderr" }) {
			t.Errorf("standard error is not in the terminal's log: %q", c.output(t))
		}
	})
}

// Whatever the server, the monitor and the runtime have open, a container has
// the three standard streams only (CVE-2024-21626).
func TestNoLeakedDescriptors_CVE_2024_21626(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "facts ; sleep")
		c.says(t, "}\n")
		for who, f := range map[string]*facts.Facts{"container": lastFacts(t, c), "exec": c.facts(t)} {
			for fd, to := range f.FDs {
				if fd > 2 && !ownDescriptor(to) {
					t.Errorf("the %s has descriptor %d: %s", who, fd, to)
				}
			}
		}
	})
}

// ownDescriptor reports whether a descriptor is one that the probe itself opens
// to look around, or the Go runtime to learn the CPU limit.
func ownDescriptor(to string) bool {
	return to == "anon_inode:[eventpoll]" || to == "anon_inode:[eventfd]" ||
		strings.HasPrefix(to, "/proc/") || strings.HasPrefix(to, "/sys/fs/cgroup/cpu")
}
