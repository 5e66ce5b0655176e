package runtimes

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

func TestExitCodes(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		for line, want := range map[string]int32{"exit 0": 0, "exit 5": 5, "exit 255": 255} {
			s := p.Start(t, line).Wait(t)
			if s.ExitCode != want || (want == 0) != (s.Reason == "Completed") {
				t.Errorf("%q ended with code %d, %s, want %d", line, s.ExitCode, s.Reason, want)
			}
		}
	})
}

// The hostname is the pod's, or the node's if the pod shares its network.
func TestHostname(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler, func(c *cri.PodSandboxConfig) { c.Hostname = "a-name.of-its.own" })
		scene.Equal(t, "hostname", p.Facts(t).Hostname, "a-name.of-its.own")
		own, err := os.Hostname()
		if err != nil {
			t.Fatal(err)
		}
		p = w.Pod(t, handler, func(c *cri.PodSandboxConfig) {
			c.Hostname, c.Linux.SecurityContext.NamespaceOptions.Network = "", cri.NamespaceMode_NODE
		})
		scene.Equal(t, "hostname in the node's network", p.Facts(t).Hostname, own)
	})
}

// Everything that a container writes is in its log, however short its life.
func TestLogs(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		const size = 3 << 20
		c := w.Pod(t, handler).Start(t, fmt.Sprintf("echo begin ; bytes %d 100 ; echo -err oops ; exit 3", size))
		if s := c.Wait(t); s.ExitCode != 3 {
			t.Errorf("exit code %d", s.ExitCode)
		}
		if out := c.Output(t); !strings.HasPrefix(out, "begin\n") || len(out) < size {
			t.Errorf("%d bytes in the log: %.40q", len(out), out)
		}
		scene.Equal(t, "standard error", c.Errors(t), "oops\n")
	})
}

// Containers of a pod come and go; they share its network and nothing else.
func TestSeveralContainers(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		server := p.Start(t, "serve 127.0.0.1:8080 hello")
		for range 2 {
			scene.Equal(t, "answer", strings.TrimSpace(p.Finish(t, "get http://127.0.0.1:8080/")), "hello")
		}
		server.Refuses(t, "cat /nowhere", "no such file")
		if n := len(server.Facts(t).Processes); n != 2 { // itself and the one that prints the facts
			t.Errorf("a container sees %d processes", n)
		}
		other := p.Start(t, "write /mine here ; sleep")
		wait.For(t, "a container's file", func() bool { return other.ExecResult(t, "/probe", "cat", "/mine").ExitCode == 0 })
		server.Refuses(t, "cat /mine", "no such file")
		other.Remove(t)
		scene.Equal(t, "state", server.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
		server.Stop(t, 0)
		scene.Equal(t, "exit code", server.Wait(t).ExitCode, int32(137))
		p.Start(t, "sleep") // in place of a dead one
	})
}

func TestSharedProcesses(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		shared := &cri.NamespaceOption{Pid: cri.NamespaceMode_POD}
		p := w.Pod(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions = shared })
		mine := func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions = shared }
		p.Start(t, "echo marker ; sleep", mine).Says(t, "marker")
		seen := p.Start(t, "sleep", mine).Facts(t).Processes
		for _, line := range seen {
			if strings.Contains(line, "marker") {
				return
			}
		}
		t.Errorf("processes of the other container are not seen, only %v", seen)
	})
}

// The stop signal, then SIGKILL; and a container that never ran.
func TestStop(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		c := p.Start(t, "trap SIGTERM ; exit 7")
		c.Says(t, "ready")
		c.Stop(t, scene.LimitSeconds)
		scene.Equal(t, "exit code", c.Status(t).ExitCode, int32(7))
		scene.Equal(t, "signal", strings.TrimSpace(strings.TrimPrefix(c.Output(t), "ready")), "SIGTERM")

		c = p.Start(t, "trap SIGTERM ; sleep 3s ; exit 7") // longer than the stand-in for Kata 1 would let it
		c.Says(t, "ready")
		c.Stop(t, scene.LimitSeconds)
		scene.Equal(t, "exit code of one that takes its time", c.Status(t).ExitCode, int32(7))

		c = p.Start(t, "ignore SIGTERM ; echo deaf ; sleep")
		c.Says(t, "deaf")
		c.Stop(t, 1)
		scene.Equal(t, "exit code of one that does not listen", c.Status(t).ExitCode, int32(137))

		c = p.Create(t, "sleep")
		c.Stop(t, 1)
		scene.Equal(t, "state of one that never ran", c.Status(t).State, cri.ContainerState_CONTAINER_EXITED)
		c.Remove(t)
		p.Create(t, "sleep").Remove(t)
		p.Start(t, "sleep").Remove(t)
	})
}

// A program that cannot be run is reported at the start, whenever the runtime
// finds out.
func TestNoSuchProgram(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		c := p.Create(t, "", func(c *cri.ContainerConfig) { c.Command = []string{"/no/such/program"} })
		err := c.TryStart(t.Context())
		scene.WantCode(t, err, codes.FailedPrecondition, "/no/such/program")
		if s := c.Wait(t); s.ExitCode != 128 || s.Reason != "StartError" || !strings.Contains(s.Message, "/no/such/program") {
			t.Errorf("code %d, %s: %s", s.ExitCode, s.Reason, s.Message)
		}
		p.Start(t, "sleep")
	})
}

func TestHostNetwork(t *testing.T) {
	// A file for all pods tells gVisor's shim which network they have.
	eachOf(t, slices.DeleteFunc(wanted(), func(h string) bool { return h == ofRunsc }), func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler, kubelet.HostNetwork)
		out := p.Finish(t, "facts", func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
		})
		if !strings.Contains(out, "10.99.0.1/16") { // the bridge's
			t.Errorf("no address of the node's in %s", out)
		}
	})
}

// The node's files in the container, and vice versa.
func TestMounts(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		dir := w.Dir(t)
		scene.Write(t, dir+"/in", "from the node")
		c := w.Pod(t, handler).Start(t, "write /vol/out back ; sleep", func(c *cri.ContainerConfig) {
			c.Mounts = []*cri.Mount{{ContainerPath: "/vol", HostPath: dir}, {ContainerPath: "/ro", HostPath: dir, Readonly: true}}
		})
		scene.Equal(t, "file", c.Exec(t, "cat /vol/in"), "from the node")
		wait.For(t, "what the container writes", func() bool { text, _ := os.ReadFile(dir + "/out"); return string(text) == "back" })
		c.Refuses(t, "write /ro/x y", "read-only")
	})
}

// An image with a shell.
func TestShell(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		const busybox = "/bin/busybox"
		shell, err := image.HostFile("bin/sh", busybox, 0o755)
		if err != nil {
			t.Fatal(err)
		}
		ref := w.Image(t, func(c *imagespec.ImageConfig) { c.Entrypoint = []string{"/bin/sh", "-c"} }, image.Dir("bin"), shell)
		p := w.Pod(t, handler)
		c := p.Start(t, "", func(c *cri.ContainerConfig) {
			c.Image.Image, c.Args = ref, []string{`trap "exit 9" TERM; echo up; while :; do sleep 0.1; done`}
		})
		c.Says(t, "up")
		r := c.ExecResult(t, "/bin/sh", "-c", "echo one | sed s/one/two/; (exit 4)")
		if r.ExitCode != 4 || string(r.Stdout) != "two\n" {
			t.Errorf("code %d, %q, %q", r.ExitCode, r.Stdout, r.Stderr)
		}
		c.Stop(t, scene.LimitSeconds)
		scene.Equal(t, "exit code", c.Status(t).ExitCode, int32(9))

		if handler == gvisor || handler == ofRunsc { // whose kernel kills PID 1 too
			return
		}
		// Linux discards signals without a handler for PID 1.
		deaf := p.Start(t, "", func(c *cri.ContainerConfig) {
			c.Image.Image, c.Args = ref, []string{"echo up; while :; do sleep 0.1; done"}
		})
		deaf.Says(t, "up")
		deaf.Stop(t, 1)
		scene.Equal(t, "exit code without a handler", deaf.Status(t).ExitCode, int32(137))
		said := w.LogAbout(100, deaf.ID)
		if !strings.Contains(said, "did not exit within the grace period") || strings.Contains(said, "had no handler for the signal") == sandboxed(handler) {
			t.Errorf("the server's log says %s", said)
		}
	})
}
