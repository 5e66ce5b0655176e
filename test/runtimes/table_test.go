package runtimes

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

func handlerNames(t *testing.T, w *scene.World) []string {
	t.Helper()
	resp, err := w.Runtime().Status(t.Context(), &cri.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, h := range resp.RuntimeHandlers {
		names = append(names, h.Name)
	}
	return names
}

func reload(t *testing.T, w *scene.World, file, text string) {
	t.Helper()
	if err := w.Configure(file, text); err != nil {
		t.Fatal(err)
	}
	if err := w.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
}

// wantReload runs crius reload, which must end with that code and whose output
// must contain words.
func wantReload(t *testing.T, w *scene.World, file, text string, code int, words ...string) {
	t.Helper()
	if err := w.Configure(file, text); err != nil {
		t.Fatal(err)
	}
	argv := w.Argv("reload")
	out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput()
	var exit *exec.ExitError
	got := 0
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	if got != code || !containsAll(string(out), words) {
		t.Errorf("crius reload ended with %d, want %d and %q in: %s", got, code, words, out)
	}
}

// The command reports the result of the reload.
func TestReloadCommand(t *testing.T) {
	t.Parallel()
	w := scene.Private(t, node.Options{})
	wantReload(t, w, "20-more", "[runtime.handlers.more]\npath = \"crun\"\n[api]\nmax_message_size = 8388608\n", 0,
		"changed: runtime.handlers.more\n", "needs a restart: api.max_message_size")
	if names := handlerNames(t, w); !slices.Contains(names, "more") {
		t.Errorf("the handlers are %q when the command has ended", names)
	}
	wantReload(t, w, "30-bad", "[pod]\npids_limt = 77\n", 1, "30-bad", "pids_limt")
	wantReload(t, w, "30-bad", "[runtime.handlers.bad]\npath = \"crun\"\nseccomp_profile = \"/no/such/profile\"\n", 1,
		"runtime.handlers.bad.seccomp_profile", "/no/such/profile")
	logs(t, w, "configuration not reloaded", "/no/such/profile")
	wantReload(t, w, "30-bad", "", 0, "needs a restart: api.max_message_size")
	wantReload(t, w, "20-more", "# none", 0, "changed: runtime.handlers.more\n")
	wantReload(t, w, "20-more", "# none, still", 0, "no option has changed\n")
	if err := w.Stop(); err != nil {
		t.Fatal(err)
	}
	wantReload(t, w, "20-more", "", 1, "no server at", "systemctl start crius")
}

func logs(t *testing.T, w *scene.World, words ...string) {
	t.Helper()
	if !wait.Until(t.Context(), func() bool { return containsAll(w.LogTail(1000), words) }) {
		t.Errorf("the log never says %q:\n%s", words, w.LogTail(20))
	}
}

// A handler that is added runs pods at once; one that is removed keeps its
// pods; and an invalid configuration changes nothing.
func TestReload(t *testing.T) {
	t.Parallel()
	w := scene.Private(t, node.Options{})
	old := w.Pod(t, "crun").Start(t, "sleep")

	reload(t, w, "20-more", "[runtime.handlers.more]\npath = \"crun\"\nmin_memory = 20000000\n")
	wait.For(t, "the new handler", func() bool { return slices.Contains(handlerNames(t, w), "more") })
	p := w.Pod(t, "more")
	c := p.Start(t, "sleep")
	_, err := p.Try(t.Context(), "sleep", func(c *cri.ContainerConfig) { c.Linux.Resources.MemoryLimitInBytes = 19999999 })
	scene.WantCode(t, err, codes.InvalidArgument, "19999999", "20000000", "more")
	_, err = w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{
		ContainerId: c.ID, Linux: &cri.LinuxContainerResources{MemoryLimitInBytes: 1000},
	})
	scene.WantCode(t, err, codes.InvalidArgument, "20000000")

	reload(t, w, "30-bad", "[runtime.handlers.bad]\npath = \"crun\"\nseccomp_profile = \"/no/such/profile\"\n")
	logs(t, w, "configuration not reloaded", "runtime.handlers.bad.seccomp_profile")
	reload(t, w, "30-bad", "[runtime.handlers.bad]\npath = \"crun\"\nfeatures = \"/no/such/features\"\n")
	logs(t, w, "runtime.handlers.bad.features")
	reload(t, w, "30-bad", "[runtime.handlers.worse]\npaths = \"crun\"\n")
	logs(t, w, "runtime.handlers.worse.paths")
	if names := handlerNames(t, w); slices.Contains(names, "bad") || slices.Contains(names, "worse") || !slices.Contains(names, "more") {
		t.Errorf("handlers after a reload that failed: %v", names)
	}
	reload(t, w, "30-bad", "[api]\nmax_message_size = 8388608\n")
	logs(t, w, "take effect after a restart", "api.max_message_size")

	reload(t, w, "20-more", "")
	wait.For(t, "the handler to be taken away", func() bool { return !slices.Contains(handlerNames(t, w), "more") })
	_, err = w.TryPod(t, "more")
	scene.WantCode(t, err, codes.NotFound, "more")
	scene.Equal(t, "command in a pod of a handler that is gone", c.Exec(t, "echo here"), "here\n")
	p.Start(t, "sleep")
	scene.Equal(t, "command in a pod from before", old.Exec(t, "echo here"), "here\n")
}

const ownNetwork = `{"cniVersion": "1.0.0", "name": "own", "plugins": [{"type": "bridge", "bridge": "crbr1", "isGateway": true,
  "ipam": {"type": "host-local", "dataDir": "{{.Path "cni" "leases"}}", "ranges": [[{"subnet": "10.98.0.0/16"}]]}}]}`

// A handler of the other type that is added runs pods at once as well.
func TestReloadShim(t *testing.T) {
	t.Parallel()
	config, err := tools.Handler(t.Context(), ofRunc)
	if err != nil {
		t.Skipf("NOT TESTED, there is no %s: %v", ofRunc, err)
	}
	w := scene.Private(t, node.Options{})
	if _, err := w.TryPod(t, ofRunc); err == nil {
		t.Fatal("a handler runs pods before it is configured")
	}
	reload(t, w, "20-shim", config)
	wait.For(t, "the new handler", func() bool { return slices.Contains(handlerNames(t, w), ofRunc) })
	scene.Equal(t, "command", w.Pod(t, ofRunc).Start(t, "sleep").Exec(t, "echo here"), "here\n")
}

// At its start the node logs its handlers, and why one is missing.
func TestHandlersAreProbedAtStart(t *testing.T) {
	t.Parallel()
	w := scene.Private(t, node.Options{Config: "[runtime.handlers.gone]\npath = \"/no/such/runtime\"\n"})
	logs(t, w, `msg="runtime handler is ready" handler=runc`, `msg="runtime handler cannot be used" handler=gone`)
}

// Each key of a handler's table has its effect.
func TestHandlerKeys(t *testing.T) {
	t.Parallel()
	w := scene.Private(t, node.Options{})
	for name, text := range map[string]string{
		"own.d/10.conflist": ownNetwork,
		"own-features.json": `{"ociVersionMin": "1.0.0", "ociVersionMax": "1.0.2", "mountOptions": ["bind", "rbind", "ro"]}`,
		"own.json":          `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 28}]}`,
	} {
		if err := w.Write(name, text); err != nil {
			t.Fatal(err)
		}
	}
	reload(t, w, "20-own", `[runtime.handlers.own]
path = "runc"
root = "{{.Path "own-root"}}"
options = ["--debug", "--log={{.Path "own.log"}}"]
default_annotations = ["example.com/node=yes", "example.com/pod=no", "example.com/rest=a=b"]
allowed_annotations = ["example.com/pod", "pattern.example.com/*"]
allowed_container_annotations = ["device.example.com/*"]
seccomp_profile = "{{.Path "own.json"}}"
monitor_cgroup = "/{{.ID}}/own"
cni_conf_dir = "{{.Path "own.d"}}"
privileged_without_host_devices = true
features = "{{.Path "own-features.json"}}"

[runtime.handlers.gone]
path = "no-such-runtime"
`)
	wait.For(t, "the new handler", func() bool { return slices.Contains(handlerNames(t, w), "own") })
	if readOnly := recursiveReadOnly(t, w); readOnly["own"] || !readOnly["runc"] {
		t.Errorf("features: handlers with recursive read-only mounts: %v", readOnly)
	}
	p := w.Pod(t, "own", func(c *cri.PodSandboxConfig) {
		c.Linux.SecurityContext.Privileged = true
		c.Annotations["example.com/pod"], c.Annotations["example.com/rest"] = "mine", "mine"
		c.Annotations["pattern.example.com/a"], c.Annotations["device.example.com/a"] = "pod", "pod"
	})
	if ip := p.Status(t).Network.Ip; !strings.HasPrefix(ip, "10.98.") {
		t.Errorf("cni_conf_dir: the pod's address is %s", ip)
	}
	c := p.Start(t, "sleep", func(c *cri.ContainerConfig) {
		c.Annotations = map[string]string{"device.example.com/b": "container", "pattern.example.com/b": "container"}
	})
	got := annotations(t, c)
	for key, want := range map[string]string{
		"example.com/node": "yes", "example.com/pod": "mine", "example.com/rest": "a=b",
		"pattern.example.com/a": "pod", "pattern.example.com/b": "",
		"device.example.com/a": "", "device.example.com/b": "container",
	} {
		scene.Equal(t, "annotation "+key, got[key], want)
	}
	scene.Equal(t, "seccomp_profile: mkdir", strings.TrimSpace(c.Exec(t, "try mkdir")), "ENOSPC")
	privileged := p.Start(t, "sleep", func(c *cri.ContainerConfig) {
		s := c.Linux.SecurityContext
		s.Privileged, s.MaskedPaths, s.ReadonlyPaths = true, nil, nil
	})
	privileged.Refuses(t, "stat /dev/kmsg", "no such file")
	monitor, _ := processes(t, runDir(c))
	if cgroups := scene.Read(t, filepath.Join("/proc", strconv.Itoa(monitor), "cgroup")); !strings.Contains(cgroups, "/"+w.ID+"/own") {
		t.Errorf("monitor_cgroup: the monitor is in %s", cgroups)
	}
	for _, path := range []string{"own.log", "own-root"} {
		if st, err := os.Stat(w.Path(path)); err != nil || st.Size() == 0 {
			t.Errorf("%s: %v", path, err)
		}
	}
	checkReports(t, w)
}

// recursiveReadOnly returns for each offered handler whether it promises that.
func recursiveReadOnly(t *testing.T, w *scene.World) map[string]bool {
	t.Helper()
	resp, err := w.Runtime().Status(t.Context(), &cri.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	promised := map[string]bool{}
	for _, h := range resp.RuntimeHandlers {
		promised[h.Name] = h.Features.RecursiveReadOnlyMounts
	}
	return promised
}

// checkReports requires the handlers in the verbose Status, in crius check and
// in crius status.
func checkReports(t *testing.T, w *scene.World) {
	t.Helper()
	resp, err := w.Runtime().Status(t.Context(), &cri.StatusRequest{Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	var reports []struct {
		Name, Error, Version string
		Ready                bool
	}
	if err := json.Unmarshal([]byte(resp.Info["handlers"]), &reports); err != nil {
		t.Fatal(err)
	}
	ready := map[string]bool{}
	for _, r := range reports {
		ready[r.Name] = r.Ready
		if r.Ready == (r.Error != "") || r.Ready == (r.Version == "") {
			t.Errorf("%+v", r)
		}
	}
	if ready["gone"] || !ready["own"] || !ready["runc"] || len(reports) != 4 {
		t.Errorf("handlers in a verbose Status: %+v", reports)
	}
	for command, words := range map[string][]string{
		"check":  {"own: /", "runc version", "own-features.json)", `gone: handler gone: no "no-such-runtime" in PATH`},
		"status": {"own: runc version", "runc (default): runc version", "own-features.json)", `gone: NO: handler gone: no "no-such-runtime" in PATH`},
	} {
		if out := crius(t, w, command); !containsAll(out, words) {
			t.Errorf("crius %s does not say %q:\n%s", command, words, out)
		}
	}
}

// crius returns the output of a command of the program; its exit code may be
// due to something else on this machine.
func crius(t *testing.T, w *scene.World, command ...string) string {
	t.Helper()
	out, err := w.Ask(t, command...)
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(out)
}

func containsAll(text string, words []string) bool {
	return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(text, word) })
}

func annotations(t *testing.T, c *scene.Container) map[string]string {
	t.Helper()
	var spec struct{ Annotations map[string]string }
	if err := json.Unmarshal([]byte(scene.Read(t, filepath.Join(runDir(c), "config.json"))), &spec); err != nil {
		t.Fatal(err)
	}
	return spec.Annotations
}
