package integration

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/race"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/odd"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// inheritedState are what processes of a container have inherited, by process.
type inheritedState map[string]odd.State

// oddNode is a node whose server is started with everything changed that a
// process inherits, as long as a file exists; each stage of a container has a
// hook.
func oddNode(t *testing.T) (w *world, oddly string) {
	t.Helper()
	current, err := tools.Runc(t.Context())
	must(t, err)
	programs, err := tools.Programs(t.Context(), race.Enabled)
	must(t, err)
	dir := t.TempDir()
	oddly = filepath.Join(dir, "odd")
	script, err := odd.Wrapper(filepath.Join(programs, "crius"), oddly)
	must(t, err)
	server := filepath.Join(dir, "crius")
	scene.WriteProgram(t, server, []byte(script))
	w = private(t, node.Options{Server: server, Config: fmt.Sprintf("[runtime.handlers.current]\npath = %q\n", current)})
	must(t, os.MkdirAll(w.Path("hooks.d"), 0o755))
	for _, stage := range hookStages {
		program := w.Path("hook-" + stage)
		script, err := odd.Reporter(program + ".json")
		must(t, err)
		scene.WriteProgram(t, program, []byte(script))
		must(t, os.WriteFile(w.Path("hooks.d", stage+".json"), []byte(`{"version": "1.0.0", "hook": {"path": "`+program+`"}, `+
			`"when": {"annotations": {"^hooked$": "yes"}}, "stages": ["`+stage+`"]}`), 0o644))
	}
	return w, oddly
}

var hookStages = []string{"createRuntime", "poststart", "poststop"}

// quiet is a program that changes nothing that it inherits, unlike Go programs,
// which change signals.
var quiet = []string{"/busybox", "sleep", "1000000"}

// inheritedBy looks at all processes of a new container, and at its hooks. The
// image is new, so that this server unpacks its layers.
func (w *world) inheritedBy(t *testing.T, handler, name string) (*container, inheritedState) {
	t.Helper()
	busybox, err := tools.Busybox(t.Context())
	must(t, err)
	program, err := os.ReadFile(busybox)
	must(t, err)
	ref := w.image(t, nil, image.Text("deep/er/"+name, name), image.Regular("busybox", 0o755, program))
	found := inheritedState{}
	c := w.run(t, handler).start(t, "sleep", func(c *cri.ContainerConfig) {
		c.Image.Image = ref
		c.Command, c.Args = quiet, nil
		c.Annotations = map[string]string{"hooked": "yes"}
	})
	c.procfs(t, "status") // once it is the container's program
	init := w.processesOf(t, c.id)[0]
	found.add(t, "first process", init)
	for _, dir := range []string{"", "deep", "deep/er"} {
		info, err := os.Stat(fmt.Sprintf("/proc/%d/root/%s", init, dir))
		must(t, err)
		found["first process"]["mode of /"+dir] = info.Mode().String()
	}
	monitors := w.monitors(t, c.id)
	equal(t, "monitors", len(monitors), 1)
	found.add(t, "monitor", monitors[0])
	c.addExecs(t, found)
	for _, stage := range []string{"createRuntime", "poststart"} {
		w.addHook(t, found, stage)
	}
	return c, found
}

func (h inheritedState) add(t *testing.T, name string, pid int) {
	t.Helper()
	state, err := odd.Of(pid)
	must(t, err)
	h[name] = state
}

// openFiles is the one attribute that processes do not share: monitors and hooks have the
// limit of the server.
const openFiles = "Max open files"

func (w *world) addHook(t *testing.T, found inheritedState, stage string) {
	t.Helper()
	file := w.Path("hook-" + stage + ".json")
	wait.For(t, "the hook "+stage, func() bool { // not all runtimes wait for it
		state, err := odd.Read(file)
		found["hook "+stage] = state
		return err == nil
	})
	delete(found["hook "+stage], "environment") // the operator's choice
	must(t, os.Remove(file))
}

// addExecs looks at the processes of ExecSync and of a streamed exec.
func (c *container) addExecs(t *testing.T, found inheritedState) {
	t.Helper()
	for name, exec := range map[string]func() (ended <-chan struct{}){
		"ExecSync": func() <-chan struct{} {
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_, _ = c.pod.w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
					ContainerId: c.id, Cmd: quiet, Timeout: scene.LimitSeconds,
				})
			}()
			return ended
		},
		"Exec": func() <-chan struct{} {
			address := c.pod.w.execURL(t, c.execRequest("", func(r *cri.ExecRequest) { r.Cmd = quiet }))
			return c.pod.w.spdy().Open(t.Context(), address, kubelet.Wants{Stdout: true, Stderr: true}).Done()
		},
	} {
		before := c.pod.w.processesOf(t, c.id)
		ended := exec()
		command := 0
		wait.For(t, name, func() bool {
			for _, pid := range c.pod.w.processesOf(t, c.id) {
				line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
				if !slices.Contains(before, pid) && strings.HasPrefix(string(line), quiet[0]) {
					command = pid
				}
			}
			return command > 0
		})
		found.add(t, name, command)
		must(t, unix.Kill(command, unix.SIGKILL))
		<-ended
	}
}

// remove removes the container, and looks at its last hook.
func (h inheritedState) remove(t *testing.T, c *container) {
	t.Helper()
	c.remove(t)
	c.pod.w.addHook(t, h, "poststop")
}

func (h inheritedState) equal(t *testing.T, want inheritedState, when string) {
	t.Helper()
	for _, process := range slices.Sorted(maps.Keys(want)) {
		for name, value := range want[process] {
			if got := h[process][name]; got != value && name != openFiles {
				t.Errorf("%s: %s of %s is %q, want %q", when, name, process, got, value)
			}
		}
		for name, value := range h[process] {
			if _, ok := want[process][name]; !ok {
				t.Errorf("%s: %s of %s is %q, want none", when, name, process, value)
			}
		}
	}
}

// openFilesOf is a process's hard limit.
func openFilesOf(t *testing.T, pid int) uint64 {
	t.Helper()
	var limit unix.Rlimit
	must(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &limit))
	return limit.Max
}

func TestServerAttributesReachNoContainer_OCPBUGS_15102_runc_4858(t *testing.T) {
	t.Parallel()
	w, oddly := oddNode(t)
	every := append([]string{"current"}, handlers...)
	plain, older := map[string]inheritedState{}, map[string]*container{}
	for _, handler := range every {
		c, found := w.inheritedBy(t, handler, "plain-"+handler)
		processes := []string{"first process", "Exec", "ExecSync"}
		if handler == "runc" { // 1.1.5 sets it before the process that becomes the command raises its own
			processes = processes[:1]
		}
		for _, process := range processes {
			// cri-o#7703: the server's soft limit is much higher.
			equal(t, "limit of open files of "+process, found[process][openFiles], fmt.Sprint("1024 ", openFilesOf(t, w.PID()), " files"))
		}
		found.remove(t, c)
		plain[handler] = found
	}
	must(t, os.WriteFile(oddly, nil, 0o600))
	must(t, w.Restart(t.Context()))
	server, err := odd.Of(w.PID())
	must(t, err)
	equal(t, "the server keeps its scheduling", server["scheduling"] != plain["crun"]["first process"]["scheduling"], true)
	for _, handler := range every {
		c, found := w.inheritedBy(t, handler, "odd-"+handler)
		delete(plain[handler], "hook poststop")
		found.equal(t, plain[handler], "odd server, "+handler)
		older[handler] = c
	}
	must(t, os.Remove(oddly))
	must(t, w.Restart(t.Context()))
	for _, handler := range every {
		found := inheritedState{}
		older[handler].addExecs(t, found)
		wanted := inheritedState{"ExecSync": plain[handler]["ExecSync"], "Exec": plain[handler]["Exec"]}
		found.equal(t, wanted, "plain server again, "+handler)
	}
}

// Attributes that the server cannot keep containers from inheriting are no
// failure, and are reported.
func TestInheritedAttributesAreReported(t *testing.T) {
	t.Parallel()
	programs, err := tools.Programs(t.Context(), race.Enabled)
	must(t, err)
	server := filepath.Join(t.TempDir(), "crius")
	scene.WriteProgram(t, server, []byte("#!/bin/sh\nexec setpriv --no-new-privs "+filepath.Join(programs, "crius")+" \"$@\"\n"))
	w := private(t, node.Options{Server: server})
	equal(t, "output", w.run(t, "crun").finish(t, "echo hello"), "hello\n")
	said, _ := w.crius(t, "check")
	const words = "containers inherit from the server: no_new_privs"
	if !strings.Contains(said, words) {
		t.Errorf("check does not say %q but\n%s", words, said)
	}
	if log := w.LogTail(1000); strings.Count(log, "containers inherit what the server was started with") != 1 {
		t.Error("the log must say it once")
	}
}
