package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// Input that is piped to a command arrives, with its end, each time and however much it is.
func TestPipedInputArrives_kubernetes_61557_podman_5046(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const size = 6 << 20 // more than all buffers on the way
	w.eachTransport(t, func(t *testing.T, s kubelet.Streams, handler string) {
		c := w.run(t, handler).start(t, "sleep")
		for range 10 {
			e := c.session(t, s, "cat", withInput)
			typed(t, e, "a")
			e.EndInput()
			endsWith(t, e, 0)
			equal(t, "output", e.Stdout.String(), "a")
		}
		e := c.session(t, s, "digest", withInput)
		must(t, e.Send(noise(size)))
		e.EndInput()
		endsWith(t, e, 0)
		equal(t, "what the command read", e.Stdout.String(), noiseSum(size)+"\n")
	})
}

// A session on a terminal ends with its container where processes are shared as well, and
// with it all that was started on it.
func TestTerminalEndsWithTheContainer_kubernetes_89233_kubernetes_129144(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		for _, mode := range []cri.NamespaceMode{cri.NamespaceMode_POD, cri.NamespaceMode_CONTAINER} {
			forPod, forContainer := pidMode(mode)
			p := w.run(t, handler, forPod)
			c := p.start(t, "sleep", forContainer)
			e := c.session(t, w.spdy(), "ignore HUP INT TERM ; echo ready ; orphan sleep ; sleep", withTerminal)
			shows(t, e, "ready")
			c.stop(t, 0)
			_ = e.Wait(wait.Limit)
			select {
			case <-e.Done():
			default:
				t.Error(fmt.Sprint(mode), ": the session goes on")
			}
			p.stop(t)
		}
	})
}

// A command in a container that somebody has frozen, alone or with its pod, is refused, and the answer says
// how to thaw it. runc would wait for ever in a frozen pod.
func TestExecInAPausedContainer_runc_3131_crun_727(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		parent := w.CgroupParent() + "/paused" + handler
		t.Cleanup(func() { // the kubelet removes it
			for _, dir := range inventory.Cgroups(parent) {
				os.Remove(dir)
			}
		})
		p := w.run(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent = parent })
		c := p.start(t, "echo ready ; sleep")
		c.says(t, "ready") // no thread of the runtime is frozen half-way
		for _, group := range []string{parent + "/crius-" + c.id, parent} {
			thaw := freezeCgroup(t, group)
			const says = "its cgroup is frozen, not by crius: thaw it (echo "
			_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "echo", "here"}, Timeout: scene.LimitSeconds})
			wantCode(t, err, codes.Unavailable, says, group+"/")
			if err := c.session(t, w.spdy(), "echo here").Wait(wait.Limit); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("the session ended with %v", err)
			}
			equal(t, group+" is still frozen", thaw(), true)
			equal(t, "output", c.exec(t, "echo here"), "here\n")
		}
	})
}

// If a container or command cannot be started in a pod that has all the processes it may have, the answer says
// so: the runtime says "connection reset by peer", or EOF.
func TestLimitOfProcessesIsNamed_runc_4083_runc_4905(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, handler string) {
		w, runtime := brittle(t, handler)
		parent := w.CgroupParent() + "/limited"
		t.Cleanup(func() { // the kubelet removes it
			for _, dir := range inventory.Cgroups(parent) {
				os.Remove(dir)
			}
		})
		p := w.run(t, "brittle", func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent = parent })
		c := p.start(t, "sleep")
		dir, _ := cgroupDir(t, c.cgroups(t), "pids")
		ofPod := filepath.Dir(dir)
		limit := func(most string) {
			t.Helper()
			must(t, os.WriteFile(filepath.Join(ofPod, "pids.max"), []byte(most), 0))
		}
		fail := func(code codes.Code, words ...string) {
			t.Helper()
			runtime.does(t, "exec", "fail")
			_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "echo", "here"}, Timeout: scene.LimitSeconds})
			wantCode(t, err, code, words...)
			runtime.does(t, "create", "fail")
			_, err = p.try(t.Context(), steps("sleep"))
			wantCode(t, err, code, words...)
			runtime.heal(t)
		}
		tasks, err := strconv.Atoi(strings.TrimSpace(read(t, filepath.Join(ofPod, "pids.current"))))
		must(t, err)
		most := strconv.Itoa(tasks + 8) // a program in Go wants threads of its own
		limit(most)
		fail(codes.ResourceExhausted, "of at most "+most+" processes and threads (pids.max)")
		limit("max")
		fail(codes.Unknown, "")
		equal(t, "output", c.exec(t, "echo here"), "here\n")
	})
}
