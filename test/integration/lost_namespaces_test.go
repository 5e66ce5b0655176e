package integration

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// A pod without a namespace that it needs is not ready as soon as a kubelet asks, which makes a new
// one then. A restart does not change that, and the pod can be removed.
func TestPodWithoutANamespaceIsNotReady_crio_1927(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	var dead, unpinned []*pod
	for _, handler := range handlers {
		for kind, ask := range map[string]func(*pod) cri.PodSandboxState{
			"network": func(p *pod) cri.PodSandboxState { return p.status(t).State },
			"ipc":     func(p *pod) cri.PodSandboxState { return p.listed(t) },
			"uts": func(p *pod) cri.PodSandboxState {
				_, err := p.try(t.Context(), steps("sleep"))
				wantCode(t, err, codes.FailedPrecondition, "not ready")
				return p.listed(t)
			},
		} {
			p := w.run(t, handler)
			c := p.start(t, "sleep")
			equal(t, "state with all namespaces", p.listed(t), cri.PodSandboxState_SANDBOX_READY)
			p.unpin(t, kind)
			equal(t, "state without its "+kind+" namespace", ask(p), cri.PodSandboxState_SANDBOX_NOTREADY)
			equal(t, "state in its status", p.status(t).State, cri.PodSandboxState_SANDBOX_NOTREADY)
			equal(t, "addresses", p.status(t).GetNetwork().GetIp(), "")
			equal(t, "state of its container", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING) // the kubelet stops it
			unpinned = append(unpinned, p)
		}
		forPod, _ := pidMode(cri.NamespaceMode_POD)
		p := w.run(t, handler, forPod)
		for _, pid := range w.aliveIn(t, p.id) {
			must(t, unix.Kill(pid, unix.SIGKILL))
		}
		wait.For(t, "a pod whose PID namespace is gone not to be ready", func() bool { return p.listed(t) == cri.PodSandboxState_SANDBOX_NOTREADY })
		dead = append(dead, p)
	}
	found := w.check(t) // which compares with the node what the server has noticed itself, too
	for _, p := range unpinned {
		if !found.says("pod "+p.id+" (", "): it is not ready, because", "the kubelet recreates it") {
			t.Errorf("check does not name pod %s: %+v", p.id, found)
		}
	}
	must(t, w.Crash(t.Context()))
	for _, p := range append(dead, unpinned...) {
		equal(t, "state after a crash", p.listed(t), cri.PodSandboxState_SANDBOX_NOTREADY)
		p.stop(t)
		p.remove(t)
	}
}

// Files and mounts of a pod that are gone are back for the next container.
func TestFilesOfAPodComeBack(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for _, name := range []string{"shm", "files"} {
			must(t, unix.Unmount(filepath.Join(w.RunRoot(), "pods", p.id, name), unix.MNT_DETACH))
		}
		c := p.start(t, "sleep")
		equal(t, "file system of /dev/shm", p.facts(t).Mount("/dev/shm").Type, "tmpfs")
		equal(t, "of /dev/shm there is", c.exec(t, "write /dev/shm/file x ; fill /dev/shm/file 64"), "64\n")
		c.exec(t, "cat /etc/resolv.conf")
	})
}

// listed returns the pod's state in a list of all pods.
func (p *pod) listed(t *testing.T) cri.PodSandboxState {
	t.Helper()
	resp, err := p.w.Runtime().ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
	must(t, err)
	i := slices.IndexFunc(resp.Items, func(one *cri.PodSandbox) bool { return one.Id == p.id })
	if i < 0 {
		t.Fatalf("pod %s is not in the list", p.id)
	}
	return resp.Items[i].State
}

// unpin takes a namespace away from the pod, as somebody who tidies up does.
func (p *pod) unpin(t *testing.T, kind string) {
	t.Helper()
	resp, err := p.w.Runtime().PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: p.id, Verbose: true})
	must(t, err)
	for _, n := range decodeInfo(t, resp.Info).RuntimeSpec.Linux.Namespaces {
		if string(n.Type) == kind {
			must(t, unix.Unmount(n.Path, unix.MNT_DETACH))
			must(t, os.Remove(n.Path))
		}
	}
}
