package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// wantNotReady waits until a condition is false with these words in its reason,
// and requires the same text each time: the kubelet updates the node's status
// whenever it changes.
func (w *world) wantNotReady(t *testing.T, kind string, words ...string) {
	t.Helper()
	first := new(cri.RuntimeCondition)
	missing := func(word string) bool { return !strings.Contains(first.Message, word) }
	if !wait.Until(t.Context(), func() bool {
		first = w.condition(t, kind)
		return !first.Status && !slices.ContainsFunc(words, missing) // after a pause it may once more be as before
	}) {
		t.Fatalf("%s: %v, want it to be false and to say %q", kind, first, words)
	}
	if first.Reason == "" {
		t.Error("no reason")
	}
	for range 2 {
		if next := w.condition(t, kind); next.Message != first.Message || next.Status {
			t.Errorf("%s: %v became %v", kind, first, next)
		}
	}
}

func (w *world) wantReady(t *testing.T, kind, when string) {
	t.Helper()
	if c := w.condition(t, kind); !c.Status {
		t.Errorf("%s: %s is false: %s", when, kind, c.Message)
	}
}

// awaitReady is for a problem that has been fixed: a call waits some seconds
// for a new look, and then returns the old answer.
func (w *world) awaitReady(t *testing.T, kind, when string) {
	t.Helper()
	wait.For(t, kind+" "+when, func() bool { return w.condition(t, kind).Status })
}

// offered returns the handlers in the node's status.
func (w *world) offered(t *testing.T) (names []string) {
	t.Helper()
	for _, h := range w.statusOf(t).RuntimeHandlers {
		names = append(names, h.Name)
	}
	return names
}

// program replaces a program atomically: the server must not find none or half
// of one.
func program(t *testing.T, path, script string) {
	t.Helper()
	scene.WriteProgram(t, path+".new", []byte("#!/bin/sh\n"+script+"\n"))
	must(t, os.Rename(path+".new", path))
}

// A handler that is missing, broken or hanging affects only itself: the pod
// that installs it has to run first (D1). The reason is reported everywhere.
func TestOptionalHandlerDoesNotMakeTheNodeNotReady(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: `[runtime.handlers.absent]
path = "{{.Path "absent"}}"
[runtime.handlers.broken]
path = "/bin/false"
[runtime.handlers.slow]
path = "{{.Path "slow"}}"
`})
	must(t, os.WriteFile(w.Path("hang"), nil, 0o600))
	defer os.Remove(w.Path("hang"))
	program(t, w.Path("slow"), fmt.Sprintf("while [ -e %s ]; do sleep 0.02; done; exec crun \"$@\"", w.Path("hang")))
	w.wantReady(t, "RuntimeReady", "with three bad handlers")
	wait.For(t, "the handlers that are well", func() bool { // a status waits for a slow one two seconds
		return slices.Equal(slices.Sorted(slices.Values(w.offered(t))), []string{"", "crun", "runc"})
	})
	w.run(t, "crun").finish(t, "echo works")

	if log := w.LogTail(1000); !strings.Contains(log, `msg="runtime handler is ready" handler=runc`) || !strings.Contains(log, `msg="runtime handler cannot be used" handler=absent`) {
		t.Errorf("the log does not say which handlers there are:\n%s", w.LogTail(20))
	}
	verbose, err := w.Runtime().Status(t.Context(), &cri.StatusRequest{Verbose: true})
	must(t, err)
	var reports []struct{ Name, Error string }
	must(t, json.Unmarshal([]byte(verbose.Info["handlers"]), &reports))
	told := map[string]string{}
	for _, r := range reports {
		told[r.Name] = r.Error
	}
	status, err := w.crius(t, "status")
	must(t, err)
	check, err := w.crius(t, "check")
	must(t, err)
	for name, reason := range map[string]string{"absent": "no such file", "broken": "exit status 1", "slow": "did not report its version and features in time"} {
		if !strings.Contains(told[name], reason) {
			t.Errorf("handler %s: the verbose status says %q, not %q", name, told[name], reason)
		}
		for what, text := range map[string]string{"status": status, "check": check} {
			said := false
			for line := range strings.Lines(text) {
				said = said || strings.Contains(line, name+": ") && strings.Contains(line, reason) && (what != "check" || strings.HasPrefix(line, "warn"))
			}
			if !said {
				t.Errorf("crius %s does not say that of handler %s:\n%s", what, name, text)
			}
		}
		code := codes.Unavailable
		if name == "slow" {
			code = codes.DeadlineExceeded
		}
		_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: w.podConfig(t), RuntimeHandler: name})
		wantCode(t, err, code, "handler "+name, reason)
	}
	must(t, os.Remove(w.Path("hang")), os.Symlink(w.Path("slow"), w.Path("absent")))
	wait.For(t, "the handlers that are well now", func() bool { return len(w.offered(t)) == 5 })
	w.run(t, "slow").finish(t, "echo works")
}

// Without the default handler pods that name no handler cannot run, so the node
// is not ready. A runtime that was ready and now hangs is another case.
func TestDefaultHandlerIsTheNodes(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: `[runtime]
default_handler = "main"
[runtime.handlers.main]
path = "{{.Path "main"}}"
`})
	w.wantNotReady(t, "RuntimeReady", "handler main", w.Path("main"), "no such file")
	_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: w.podConfig(t)})
	wantCode(t, err, codes.Unavailable, "handler main")
	w.run(t, "crun").finish(t, "echo works")

	program(t, w.Path("main"), `echo "time=$(date +%s%N) pid=$$ cannot start" >&2; exit 1`)
	w.wantNotReady(t, "RuntimeReady", "handler main", "cannot start")

	program(t, w.Path("main"), `exec crun "$@"`)
	wait.For(t, "the default handler", func() bool { return w.condition(t, "RuntimeReady").Status })
	w.run(t, "").finish(t, "echo works")

	must(t, os.WriteFile(w.Path("hang"), nil, 0o600))
	defer os.Remove(w.Path("hang"))
	program(t, w.Path("main"), fmt.Sprintf("while [ -e %s ]; do sleep 0.02; done; exec crun \"$@\"", w.Path("hang")))
	w.wantReady(t, "RuntimeReady", "while the new runtime hangs")
	must(t, os.Remove(w.Path("hang")))
	w.run(t, "").finish(t, "echo works")
}

// Without the monitor program no pod can start (O6), and running ones continue
// and can be ended.
func TestMissingMonitorIsNotReady(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[runtime]\nmonitor = \"{{.Path \"crius-conmon\"}}\"\n"})
	monitor := w.Path("crius-conmon")
	must(t, os.Symlink(w.Program("crius-conmon"), monitor))
	w.wantReady(t, "RuntimeReady", "at first")
	p := w.run(t, "crun")
	c := p.start(t, "sleep")
	must(t, os.Rename(monitor, monitor+".away"))
	w.wantNotReady(t, "RuntimeReady", monitor, "no such file", "runtime.monitor")
	equalSet(t, "handlers", w.offered(t), []string{"", "runc"}) // the default one is the node's
	_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: w.podConfig(t)})
	wantCode(t, err, codes.Unavailable, monitor)
	c.exec(t, "echo still-here")
	p.vanish(t)
	must(t, os.Rename(monitor+".away", monitor))
	w.awaitReady(t, "RuntimeReady", "with the monitor back")
	w.run(t, "crun").finish(t, "echo works")
}

// fill leaves no byte on the node's disk, except for what the server has
// reserved. It may be repeated.
func (w *world) fill(t *testing.T) {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(w.Path(), &st))
	used := (st.Blocks - st.Bfree) * uint64(st.Bsize)
	must(t, unix.Mount("", w.Path(), "", unix.MS_REMOUNT, fmt.Sprintf("size=%d", used+4<<20)))
	f, err := os.OpenFile(w.Path("ballast"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	must(t, err)
	defer f.Close()
	for size := 1 << 20; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
}

// A full disk does not make the node not ready, which would keep the kubelet
// from deleting what fills it: everything that can be removed is removed (D7,
// O7).
func TestFullDiskAllowsRemovals(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	ref := w.unusual(t, "unused", image.Regular("file", 0o644, []byte("x")))
	_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}})
	must(t, err)
	for _, handler := range handlers {
		p := w.run(t, handler)
		running, exited, created := p.start(t, "sleep"), p.start(t, "exit 3"), p.create(t, "sleep")
		exited.wait(t)
		stopped := w.run(t, handler, func(c *cri.PodSandboxConfig) { c.Metadata.Name += "-stopped" })
		stopped.start(t, "sleep")
		stopped.stop(t)

		w.fill(t)
		w.wantReady(t, "RuntimeReady", "on a full disk")
		warned := map[string]bool{}
		report, err := w.crius(t, "check")
		for line := range strings.Lines(report) {
			for _, key := range []string{"root", "image.root"} {
				warned[key] = warned[key] || strings.HasPrefix(line, "warn") && strings.Contains(line, " "+key+": only 0 MiB free")
			}
		}
		if err != nil || !warned["root"] || !warned["image.root"] {
			t.Errorf("crius check on a full disk: %v:\n%s", err, report)
		}
		for _, removal := range []func(*testing.T){
			p.stop, exited.remove, created.remove, running.remove, p.remove, stopped.remove,
		} {
			w.fill(t)
			removal(t)
		}
		w.fill(t)
		_, err = w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
		must(t, err)
		w.wantReady(t, "RuntimeReady", "on a disk that was full")
		must(t, os.Remove(w.Path("ballast")), unix.Mount("", w.Path(), "", unix.MS_REMOUNT, "size=50%"))
		again := w.run(t, handler)
		again.finish(t, "echo works")
		again.vanish(t)
	}
	w.Restored(t, w.empty)
}

// modernCNI is a bridge of CNI version 1.1.0: STATUS fails while the file down
// exists, GC hangs while the file hang exists, and writes its input into gc.
const modernCNI = `case $CNI_COMMAND in
VERSION) echo '{"cniVersion": "1.1.0", "supportedVersions": ["1.0.0", "1.1.0"]}';;
STATUS) cat >/dev/null; [ ! -e DIR/down ] || { echo "{\"cniVersion\": \"1.1.0\", \"code\": 50, \"msg\": \"agent is away since $(date +%s%N) ns, pid $$\"}"; exit 1; };;
GC) cat >DIR/gc.new; mv DIR/gc.new DIR/gc; while [ -e DIR/hang ]; do sleep 0.02; done;;
*) sed 's/1\.1\.0/1.0.0/g' | /usr/lib/cni/bridge | sed 's/1\.0\.0/1.1.0/g';;
esac`

// modernNetwork gives the node that plugin, which its next server finds.
func (w *world) modernNetwork(t *testing.T) {
	t.Helper()
	program(t, w.Path("cni", "bin", "bridge"), strings.ReplaceAll(modernCNI, "DIR", w.Path("cni")))
	must(t, w.Write("cni/net.d/10-p.conflist", strings.Replace(portless, "1.0.0", "1.1.0", 1)))
}

// While a network add-on is restarted or updated the node stays ready; if it
// never was ready, it is not.
func TestNetworkStaysReadyWhileAddOnRestarts(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[network]\nready_grace_period = \"1h\"\n"})
	w.modernNetwork(t)
	w.wantReady(t, "NetworkReady", "at first")
	down, file := w.Path("cni", "down"), w.Path("cni", "net.d", "10-p.conflist")
	must(t, os.WriteFile(down, nil, 0o600))
	w.wantReady(t, "NetworkReady", "while the agent is away")
	must(t, os.Remove(down), os.Rename(file, file+".new"))
	w.wantReady(t, "NetworkReady", "while the configuration is replaced")
	_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: w.podConfig(t)})
	wantCode(t, err, codes.Unavailable)
	must(t, os.Rename(file+".new", file))
	w.run(t, "crun").finish(t, "echo works")

	must(t, os.WriteFile(down, nil, 0o600), w.Crash(t.Context()))
	w.wantNotReady(t, "NetworkReady", "agent is away")
	w.wantReady(t, "RuntimeReady", "without a network")
	must(t, os.Remove(down))
	w.awaitReady(t, "NetworkReady", "with the agent back")
	must(t, w.Configure("20-grace", "[network]\nready_grace_period = \"0s\"\n"), w.Crash(t.Context()))
	w.wantReady(t, "NetworkReady", "without a grace period")
	must(t, os.WriteFile(down, nil, 0o600))
	w.wantNotReady(t, "NetworkReady", "agent is away")
}

// At the start of a server plugins get the list of existing pods, so that they
// release what they hold for others. Only pods that are being attached wait for
// that.
func TestNetworkGarbageIsCollectedAtStart(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	w.modernNetwork(t)
	first, second := w.run(t, "crun"), w.run(t, "crun", func(c *cri.PodSandboxConfig) { c.Metadata.Name += "-2" })
	host := w.run(t, "crun", kubelet.HostNetwork, func(c *cri.PodSandboxConfig) { c.Metadata.Name += "-host" })
	must(t, w.Kill(), os.WriteFile(w.Path("cni", "hang"), nil, 0o600), w.Start(t.Context()))
	w.wantReady(t, "NetworkReady", "while plugins collect")
	var told struct {
		Valid []struct{ ContainerID, IfName string } `json:"cni.dev/valid-attachments"`
	}
	wait.For(t, "the plugins to be asked", func() bool {
		text, err := os.ReadFile(w.Path("cni", "gc"))
		return err == nil && json.Unmarshal(text, &told) == nil
	})
	var valid []string
	for _, a := range told.Valid {
		valid = append(valid, a.ContainerID+" "+a.IfName)
	}
	equalSet(t, "attachments", valid, []string{first.id + " eth0", second.id + " eth0"})
	w.statusOf(t)
	host.finish(t, "echo runs", hostNetworkContainer)
	must(t, os.Remove(w.Path("cni", "hang")))
	w.run(t, "crun", func(c *cri.PodSandboxConfig) { c.Metadata.Name += "-3" }).finish(t, "echo works")

	// A lease whose owner is unknown to this crius may be another runtime's:
	// hands off.
	lease := filepath.Join(w.Path("cni", "leases"), "pods", "10.99.7.7")
	must(t, os.WriteFile(lease, []byte("somebody-else\r\neth0"), 0o600), os.Remove(w.Path("cni", "gc")), w.Crash(t.Context()))
	wait.For(t, "the server to say so", func() bool {
		out, _ := exec.Command("grep", "-c", "another runtime may share it", w.LogFile()).Output()
		return strings.TrimSpace(string(out)) == "1"
	})
	if _, err := os.Stat(w.Path("cni", "gc")); err == nil {
		t.Error("a network that is shared was collected")
	}
	must(t, os.Remove(lease))
}
