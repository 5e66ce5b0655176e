package incidents

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// incidents are in the order of docs/troubleshoot.md, as far as a test node can have them; others are
// in test/node/guest/faults.go. Each has the text that leads to the cause in every place that should
// have it.
var incidents = []incident{
	{
		name: "no CNI configuration",
		happen: func(t *testing.T, w *world) string {
			w.replace(t, w.Path("cni", "net.d", "10-p.conflist"), "")
			return w.run(t)
		},
		event: "no CNI network configuration in", status: "NO: no CNI network configuration in",
		check: "no CNI network configuration in", log: "no CNI network configuration in",
	},
	{
		name: "unusable CNI configuration",
		happen: func(t *testing.T, w *world) string {
			w.replace(t, w.Path("cni", "net.d", "05-broken.conflist"), `{"cniVersion": "1.0.0"`)
			return w.run(t)
		},
		log: "unusable CNI configuration ignored",
	},
	{
		name: "CNI plugin is not installed",
		happen: func(t *testing.T, w *world) string {
			w.replace(t, w.Path("cni", "net.d", "10-p.conflist"), plugins("missing"))
			return w.run(t)
		},
		event: `"missing" is not installed: no such executable in`, status: `NO: `, check: `"missing" is not installed`, log: `"missing" is not installed`,
	},
	{
		name: "CNI plugin fails",
		happen: func(t *testing.T, w *world) string {
			w.plugin(t, `echo '{"cniVersion": "1.0.0", "code": 100, "msg": "no more addresses"}'; exit 1`, "")
			return w.run(t)
		},
		event: "attach pod to network", log: "no more addresses",
	},
	{
		name: "CNI plugin hangs", config: "[network]\ntimeout = \"4s\"\n",
		happen: func(t *testing.T, w *world) string {
			w.plugin(t, "exec sleep 1000", "")
			return w.run(t)
		},
		event: "the plugins took longer than 4s", log: `step="CNI ADD" waits_for="CNI plugin fake"`,
	},
	{
		name: "network of a removed pod stays",
		happen: func(t *testing.T, w *world) string {
			broken := w.plugin(t, `echo '{"cniVersion": "1.0.0"}'`, `echo '{"cniVersion": "1.0.0", "code": 100, "msg": "the agent is away"}'; exit 1`)
			p := w.Pod(t, "crun", func(c *cri.PodSandboxConfig) { c.Metadata.Name = "forlorn" })
			t.Cleanup(func() {
				_ = os.Remove(broken)
				w.repair(t)
			})
			scene.Write(t, broken, "")
			_, _ = w.Runtime().StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: p.ID})
			_, _ = w.Runtime().RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: p.ID})
			return ""
		},
		status: "/forlorn (", check: "/forlorn): could not be finished, retrying", log: "the agent is away",
	},
	{
		name: "runtime of a handler is missing", config: "[runtime.handlers.gone]\npath = \"/nonexistent/runc\"\n",
		happen: func(t *testing.T, w *world) string {
			return w.run(t, func(c *cri.PodSandboxConfig) { c.Annotations = map[string]string{"handler": "gone"} })
		},
		event: `runtime binary "/nonexistent/runc" cannot be run (`, status: "gone: NO: ", check: "gone: ", log: "/nonexistent/runc",
	},
	{
		name: "handler does not exist", asked: true,
		happen: func(t *testing.T, w *world) string {
			return w.run(t, func(c *cri.PodSandboxConfig) { c.Annotations = map[string]string{"handler": "never"} })
		},
		event: "no runtime handler",
	},
	{
		name: "other cgroup driver than the kubelet", asked: true,
		happen: func(t *testing.T, w *world) string {
			return w.run(t, func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent = "/kubepods.slice/kubepods-pod1.slice" })
		},
		event: "is a systemd slice, but crius uses the cgroupfs driver",
	},
	{
		name: "host port in use", asked: true, config: "[network]\nhost_ports = \"crius\"\n",
		happen: func(t *testing.T, w *world) string {
			ports := func(c *cri.PodSandboxConfig) {
				c.PortMappings = []*cri.PortMapping{{HostPort: 8089, ContainerPort: 80}}
			}
			if err := w.run(t, ports); err != "" {
				t.Fatal(err)
			}
			return w.run(t, ports, func(c *cri.PodSandboxConfig) { c.Metadata.Name = "other" })
		},
		event: "host port 8089/tcp is already used by pod",
	},
	{
		name:   "registry does not answer",
		happen: func(t *testing.T, w *world) string { return w.pull(t, "127.0.0.1:1/app:1") },
		event:  "check that the node reaches the registry", log: "check that the node reaches the registry",
	},
	{
		name: "no such image", asked: true,
		happen: func(t *testing.T, w *world) string { return w.pull(t, w.Registry.Addr()+"/nothing:1") },
		event:  "check the name and the tag",
	},
	{
		name: "registry wants credentials",
		happen: func(t *testing.T, w *world) string {
			w.Registry.Require(registry.Auth{Username: "u", Password: "p"})
			t.Cleanup(func() { w.Registry.Require(registry.Auth{}) })
			return w.pull(t, w.Registry.Addr()+"/probe:latest")
		},
		event: "no credentials were sent to", log: "no credentials were sent to",
	},
	{
		name: "registry asks to wait",
		happen: func(t *testing.T, w *world) string {
			w.Registry.Inject(registry.Fault{Path: "/manifests/", Times: 1, Do: registry.TooManyRequests(1)})
			t.Cleanup(w.Registry.Heal)
			return w.pull(t, w.Registry.Addr()+"/probe:latest")
		},
		log: "registry asks to wait: too many requests",
	},
	{
		name: "registry stalls", config: "[image]\nprogress_timeout = \"1s\"\n",
		happen: func(t *testing.T, w *world) string {
			w.Registry.Push("stalled", "1", small(t, "stalled", 8000))
			w.Registry.Inject(registry.Fault{Path: "/stalled/blobs/", Do: registry.Stall(10)})
			t.Cleanup(w.Registry.Heal)
			return w.pull(t, w.Registry.Addr()+"/stalled:1")
		},
		event: "no data received from the registry for image.progress_timeout", log: `operation ended by a time limit`,
	},
	{
		name: "registry fails",
		happen: func(t *testing.T, w *world) string {
			w.Registry.Inject(registry.Fault{Path: "/manifests/", Do: registry.Status(http.StatusInternalServerError)})
			t.Cleanup(w.Registry.Heal)
			return w.pull(t, w.Registry.Addr()+"/probe:latest")
		},
		event: "the registry itself failed", log: "the registry itself failed",
	},
	{
		name: "registry speaks plain HTTP",
		happen: func(t *testing.T, w *world) string {
			_, port, err := net.SplitHostPort(w.Registry.Addr())
			if err != nil {
				t.Fatal(err)
			}
			return w.pull(t, "localhost:"+port+"/probe:latest")
		},
		event: "speaks plain HTTP", log: "speaks plain HTTP",
	},
	{
		name: "hosts.toml asks for headers", config: "# set below, since it names a directory of the node\n",
		happen: func(t *testing.T, w *world) string {
			dir := w.Path("hosts", "odd.example")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			scene.Write(t, filepath.Join(dir, "hosts.toml"), "[host.'https://mirror.example'.header]\nx-token = '1'\n")
			w.configure(t, "[image]\nhosts_dirs = [\""+w.Path("hosts")+"\"]\n")
			return w.pull(t, "odd.example/app:1")
		},
		event: "header is not supported", check: "images cannot be pulled from its registry", log: "header is not supported",
	},
	{
		name: "registry is blocked",
		happen: func(t *testing.T, w *world) string {
			file := w.Path("registries.conf")
			w.replace(t, file, scene.Read(t, file)+"\n[[registry]]\nlocation = \"blocked.example\"\nblocked = true\n")
			return w.pull(t, "blocked.example/app:1")
		},
		event: "registries.conf blocks it", log: "registries.conf blocks it",
	},
	{
		name: "no signature policy",
		happen: func(t *testing.T, w *world) string {
			w.replace(t, w.Path("policy.json"), "")
			return w.pull(t, w.Registry.Addr()+"/probe:latest")
		},
		event: "without a policy no image is accepted", check: "no signature policy, images cannot be pulled", log: "without a policy no image is accepted",
	},
	{
		name: "disk of the images is full",
		happen: func(t *testing.T, w *world) string {
			w.Registry.Push("large", "1", small(t, "large", 24<<20))
			w.fill(t)
			return w.pull(t, w.Registry.Addr()+"/large:1")
		},
		event: "free space in the image store", check: "MiB free at", log: "free space in the image store",
	},
	{
		name: "image for another processor",
		happen: func(t *testing.T, w *world) string {
			alien, err := image.Image{
				Platform: imagespec.Platform{OS: "linux", Architecture: "s390y"},
				Layers:   []image.Layer{script(t)}, Config: imagespec.ImageConfig{Cmd: []string{"/alien"}},
			}.Build()
			if err != nil {
				t.Fatal(err)
			}
			w.Registry.Push("alien", "1", alien)
			name := w.Registry.Addr() + "/alien:1"
			w.Pull(t, name)
			c := w.Pod(t, "crun").Create(t, "", func(c *cri.ContainerConfig) { c.Image.Image, c.Command, c.Args = name, []string{"/alien"}, nil })
			_ = c.TryStart(t.Context())
			return c.Wait(t).GetMessage()
		},
		event: "xec", log: "image is for another architecture", // exec format error, in the words of the runtime or of crius
	},
	{
		name: "no such program", asked: true,
		happen: func(t *testing.T, w *world) string {
			c := w.Pod(t, "crun").Create(t, "", func(c *cri.ContainerConfig) { c.Command, c.Args = []string{"/nothing"}, nil })
			_ = c.TryStart(t.Context())
			return c.Wait(t).GetMessage()
		},
		event: "/nothing",
	},
	{
		name: "image in use is removed", asked: true,
		happen: func(t *testing.T, w *world) string {
			w.Pod(t, "crun").Start(t, "sleep")
			_, err := w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: images.Probe}})
			return err.Error()
		},
		event: "is in use by container",
	},
	{
		name: "name of a pod is taken", asked: true,
		happen: func(t *testing.T, w *world) string {
			p := w.Pod(t, "crun")
			config := proto.CloneOf(p.Config)
			config.Hostname = "other"
			_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: "crun"})
			return strings.ReplaceAll(fmt.Sprint(err), p.ID, "ID")
		},
		event: "already exists as ID",
	},
	{
		name: "seccomp profile of a pod is missing", asked: true,
		happen: func(t *testing.T, w *world) string {
			return w.create(t, func(c *cri.ContainerConfig) {
				c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "/nonexistent/unshare.json"}
			})
		},
		event: "seccomp profile /nonexistent/unshare.json does not exist on this node",
	},
	{
		name: "device that no CDI file describes", asked: true,
		happen: func(t *testing.T, w *world) string {
			return w.create(t, func(c *cri.ContainerConfig) { c.CDIDevices = []*cri.CDIDevice{{Name: "vendor.example/gpu=all"}} })
		},
		event: "CDI devices vendor.example/gpu=all not described by any file in ",
	},
	{
		name: "file is mounted over a directory", asked: true,
		happen: func(t *testing.T, w *world) string {
			scene.Write(t, w.Path("settings.yaml"), "a: 1\n")
			return w.create(t, func(c *cri.ContainerConfig) {
				c.Mounts = append(c.Mounts, &cri.Mount{HostPath: w.Path("settings.yaml"), ContainerPath: "/dev"})
			})
		},
		event: "ot a directory", // in the words of the runtime
	},
	{
		name: "hook is not valid",
		happen: func(t *testing.T, w *world) string {
			if err := os.MkdirAll(w.Path("hooks.d"), 0o755); err != nil {
				t.Fatal(err)
			}
			w.replace(t, w.Path("hooks.d", "log.json"), `{"version": "1.0.0", "hook": {"path": "/bin/true"}, "when": {"always": "true"}, "stages": ["createContainer"]}`)
			if err := w.Crash(t.Context()); err != nil { // a server that starts looks at all hooks
				t.Fatal(err)
			}
			return w.create(t)
		},
		event: "log.json", check: "log.json", log: "invalid hook: containers cannot be created until it is corrected or removed",
	},
	{
		name: "monitor is killed",
		happen: func(t *testing.T, w *world) string {
			c := w.Pod(t, "crun").Start(t, "sleep")
			p, err := conmon.ReadProcesses(filepath.Join(w.RunRoot(), "containers", c.ID))
			if err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(p.Monitor.PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			return c.Wait(t).GetMessage()
		},
		event: "monitor", log: "monitor lost, killing its container",
	},
	{
		name: "log of a container is deleted",
		happen: func(t *testing.T, w *world) string {
			c := w.Pod(t, "crun").Start(t, "lines 1000000 50ms")
			var message string
			log := c.Status(t).GetLogPath()
			if err := os.Remove(log); err != nil {
				t.Fatal(err)
			}
			wait.For(t, "the status to tell", func() bool { message = c.Status(t).GetMessage(); return message != "" })
			t.Cleanup(func() {
				_, _ = w.Runtime().ReopenContainerLog(context.WithoutCancel(t.Context()), &cri.ReopenContainerLogRequest{ContainerId: c.ID})
			})
			return message
		},
		event: "was deleted", status: "1 running containers write what does not reach their logs", check: "was deleted", log: "container log is not at its path",
	},
	{
		name: "server is down", asked: true, // it has no log then
		happen: func(t *testing.T, w *world) string {
			w.Pod(t, "crun").Start(t, "sleep")
			t.Cleanup(func() {
				if err := w.Start(context.WithoutCancel(t.Context())); err != nil {
					t.Error(err)
				}
			})
			if err := w.Kill(); err != nil {
				t.Fatal(err)
			}
			argv := w.Argv("status")
			out, _ := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput()
			return string(out)
		},
		event: "no server at", check: "but 1 container runs: nobody can stop or restart them",
	},
	{
		name: "configuration is broken",
		happen: func(t *testing.T, w *world) string {
			if err := w.Configure("30-broken", "lisen = 1\n"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = w.Configure("30-broken", "") })
			_, err := w.Ask(t, "reload")
			if err == nil {
				t.Error("a broken configuration was loaded")
			}
			return ""
		},
		log: "configuration not reloaded, still using the old one",
	},

	{name: "server hangs", elsewhere: "the watchdog is systemd's", test: "cmd/crius/manager_test.go TestHungServerDoesNotNotifyTheWatchdog"},
	{name: "cgroup driver systemd without systemd", elsewhere: "the machine may run systemd", test: "internal/cgroup/usable_test.go TestUsable"},
	{name: "journald does not take output", elsewhere: "it needs a journal of its own", test: "conmon/monitor/journal_test.go TestJournalThatIsStuck"},
}

// What a test node cannot have is tested elsewhere.
func TestIncidentsElsewhere(t *testing.T) {
	t.Parallel()
	for _, i := range incidents {
		if i.elsewhere == "" {
			continue
		}
		file, name, _ := strings.Cut(i.test, " ")
		if text, err := os.ReadFile(filepath.Join("../..", file)); err != nil || !strings.Contains(string(text), "\nfunc "+name+"(") {
			t.Errorf("%s: %s has no %s: %v", i.name, file, name, err)
		}
	}
}

func plugins(kind string) string {
	return `{"cniVersion": "1.0.0", "name": "p", "plugins": [{"type": "` + kind + `"}]}`
}

// plugin makes the network that of a plugin which does add for ADD and, while the returned file
// exists, del for DEL.
func (w *world) plugin(t *testing.T, add, del string) (broken string) {
	t.Helper()
	path := w.Path("cni", "bin", "fake")
	broken = path + ".broken"
	text := strings.Join([]string{
		"#!/bin/sh", `case $CNI_COMMAND in`, "ADD)", add, ";;", "DEL)", "[ ! -e " + broken + " ] || { :; " + del, "}", ";;",
		`VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}' ;;`, "esac", "",
	}, "\n")
	scene.WriteProgram(t, path, []byte(text))
	t.Cleanup(func() { _ = os.Remove(path) })
	w.replace(t, w.Path("cni", "net.d", "10-p.conflist"), plugins("fake"))
	return broken
}

// fill leaves one MiB on the disk of the images and of crius's state, until the end of the test.
func (w *world) fill(t *testing.T) {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(w.StateRoot(), &st); err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(filepath.Dir(w.StateRoot()), "ballast")
	f, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(ballast); err != nil {
			t.Error(err)
		}
	})
	err = unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-1<<20)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

// small is an image with one file of so many bytes.
func small(t *testing.T, name string, bytes int) *image.Artifact {
	t.Helper()
	layer, err := image.NewLayer(image.Text(name, strings.Repeat(name+"\n", bytes/(len(name)+1))))
	if err != nil {
		t.Fatal(err)
	}
	built, err := image.Image{Layers: []image.Layer{layer}}.Build()
	if err != nil {
		t.Fatal(err)
	}
	return built
}

// script is a layer with a program of no processor.
func script(t *testing.T) image.Layer {
	t.Helper()
	layer, err := image.NewLayer(image.Regular("alien", 0o755, []byte("\x7fELF of nowhere, which no kernel executes\n")))
	if err != nil {
		t.Fatal(err)
	}
	return layer
}
