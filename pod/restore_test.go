package pod

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/test/kit/wait"
)

// restoring is a request for a pod from a checkpoint of the containers c1 and c2, which it makes.
func (b *bench) restoring(e *Engine) RestoreRequest {
	b.Helper()
	pod := b.run(e, "a")
	ctx, cancel := context.WithTimeout(b.Context(), time.Hour)
	defer cancel()
	if err := e.CheckpointSandbox(ctx, pod, b.out(), []string{b.start(e, pod, "c1"), b.start(e, pod, "c2")}); err != nil {
		b.Fatal(err)
	}
	b.remove(e, pod)
	return RestoreRequest{Dir: b.out(), Pod: podConfig("restored"), Containers: []*cri.ContainerConfig{containerConfig("c1"), containerConfig("c2")}}
}

func restore(b *bench, e *Engine, req RestoreRequest) (string, error) {
	ctx, cancel := context.WithTimeout(b.Context(), time.Hour)
	defer cancel()
	return e.RestoreSandbox(ctx, req)
}

// All containers are created from the checkpoint, and started as any others.
func TestRestoredPod(t *testing.T) {
	b := newBench(t)
	b.cfg.Restore = true
	e := b.engine()
	req := b.restoring(e)
	pod, err := restore(b, e, req)
	if err != nil {
		t.Fatal(err)
	}
	all, err := e.SandboxContainers(pod)
	if err != nil || len(all) != 2 || b.node.count("restore task") != 2 {
		t.Fatalf("there are %d containers, %v", len(all), err)
	}
	for _, v := range all {
		if v.State != cri.ContainerState_CONTAINER_CREATED {
			t.Errorf("a restored container is in state %s", v.State)
		}
		if err := e.StartContainer(t.Context(), v.ID); err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(filepath.Join(b.cfg.StateDir, "containers", v.ID, "restore")); !os.IsNotExist(err) {
			t.Errorf("of the copy is left %v, %v", left, err)
		}
	}
	if _, err := restore(b, e, req); !errors.Is(err, fault.Exists) {
		t.Errorf("once more: %v", err)
	}
	b.close(e)
	second := b.engine()
	if v, err := second.Sandbox(pod); err != nil || v.State != cri.PodSandboxState_SANDBOX_READY {
		t.Errorf("the next server has %+v, %v", v, err)
	}
	b.remove(second, pod)
	b.emptyOut()
	b.nothingLeft()
}

// What can never be restored is refused by name, and nothing is made.
func TestRestoreRefuses(t *testing.T) {
	b := newBench(t)
	b.cfg.Restore = true
	e := b.engine()
	req := b.restoring(e)
	created := b.node.count("create")
	options := func(r *RestoreRequest) *cri.NamespaceOption {
		return r.Containers[1].Linux.SecurityContext.NamespaceOptions
	}
	for _, c := range []struct {
		words  string
		change func(*RestoreRequest)
	}{
		{"hostPID", func(r *RestoreRequest) { options(r).Pid = cri.NamespaceMode_NODE }},
		{"shareProcessNamespace", func(r *RestoreRequest) { options(r).Pid = cri.NamespaceMode_POD }},
		{"another container", func(r *RestoreRequest) { options(r).Pid = cri.NamespaceMode_TARGET }},
		{"hostIPC", func(r *RestoreRequest) { options(r).Ipc = cri.NamespaceMode_NODE }},
		{"hostNetwork", func(r *RestoreRequest) { options(r).Network = cri.NamespaceMode_NODE }},
		{"user namespace", func(r *RestoreRequest) { options(r).UsernsOptions = &cri.UserNamespace{Mode: cri.NamespaceMode_POD} }},
		{"devices", func(r *RestoreRequest) { r.Containers[0].Devices = []*cri.Device{{HostPath: "/dev/null"}} }},
		{"devices", func(r *RestoreRequest) { r.Containers[0].CDIDevices = []*cri.CDIDevice{{Name: "v.com/c=d"}} }},
		{"devices", func(r *RestoreRequest) { r.Containers[0].Annotations = map[string]string{"cdi.k8s.io/x": "v.com/c=d"} }},
		{"bidirectional", func(r *RestoreRequest) {
			r.Containers[0].Mounts = []*cri.Mount{{Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL}}
		}},
		{"privileged", func(r *RestoreRequest) { r.Containers[0].Linux.SecurityContext.Privileged = true }},
		{"somebody has replaced it", func(r *RestoreRequest) { r.Manifest = strings.Repeat("ab", 32) }},
	} {
		r := RestoreRequest{Dir: req.Dir, Pod: podConfig("refused"), Containers: []*cri.ContainerConfig{containerConfig("c1"), containerConfig("c2")}}
		c.change(&r)
		if _, err := restore(b, e, r); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s: %v", c.words, err)
		}
	}
	if _, err := e.RestoreSandbox(t.Context(), req); !errors.Is(err, fault.Invalid) {
		t.Errorf("without a deadline: %v", err)
	}
	missing := req
	missing.Containers = req.Containers[:1]
	if _, err := restore(b, e, missing); !errors.Is(err, fault.Invalid) {
		t.Errorf("one of two containers: %v", err)
	}
	if b.node.count("create") != created || len(e.Sandboxes()) > 0 {
		t.Error("something was made")
	}
	b.close(e)
	b.cfg.Restore = false
	if _, err := restore(b, b.engine(), req); !errors.Is(err, fault.Unimplemented) || !strings.Contains(err.Error(), "runtime.restore") {
		t.Errorf("where it is not allowed: %v", err)
	}
	b.emptyOut()
	b.nothingLeft()
}

// A restore that fails, or lasts too long, leaves nothing, and the next try succeeds.
func TestFailedRestoreLeavesNothing(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		b.cfg.Restore = true
		e := b.engine()
		req := b.restoring(e)
		b.node.set(func() { b.node.fail["restore task"] = errInjected })
		if _, err := restore(b, e, req); !errors.Is(err, errInjected) {
			t.Errorf("it failed with %v", err)
		}
		hangs := make(chan struct{})
		b.node.set(func() { delete(b.node.fail, "restore task"); b.node.block["restore task"] = hangs })
		if _, err := restore(b, e, req); !errors.Is(err, fault.Timeout) {
			t.Errorf("it hung: %v", err)
		}
		b.node.set(func() { delete(b.node.block, "restore task") })
		close(hangs)
		if len(e.Sandboxes())+len(e.Containers()) > 0 {
			t.Error("something is left")
		}
		pod, err := restore(b, e, req)
		if err != nil {
			t.Fatal(err)
		}
		b.remove(e, pod)
		b.emptyOut()
		b.nothingLeft()
	})
}

// A container that is stopped or removed, or ends, while the next one is restored ends the restore.
func TestRestoreNoticesEndedContainers(t *testing.T) {
	for name, end := range map[string]func(b *bench, e *Engine, id string) error{
		"stopped": func(b *bench, e *Engine, id string) error { return e.StopContainer(b.Context(), id, time.Minute) },
		"removed": func(b *bench, e *Engine, id string) error { return e.RemoveContainer(b.Context(), id) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.cfg.Restore = true
			e := b.engine()
			req := b.restoring(e)
			goes := make(chan struct{})
			b.node.set(func() { b.node.block["restore task"] = goes })
			result := make(chan error, 1)
			go func() {
				_, err := restore(b, e, req)
				result <- err
			}()
			goes <- struct{}{}
			wait.For(t, "the first container", func() bool { return len(e.Containers()) == 1 })
			if err := end(b, e, e.Containers()[0].ID); err != nil {
				t.Error(err)
			}
			close(goes)
			if err := <-result; !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "while its pod was being restored") {
				t.Errorf("the restore ended with %v", err)
			}
			if len(e.Sandboxes())+len(e.Containers()) > 0 {
				t.Error("something is left")
			}
			b.emptyOut()
			b.nothingLeft()
		})
	}
}

// A server that dies before all containers are restored leaves a pod that the next one removes, with those that are.
func TestRecoveryRemovesUnfinishedRestore(t *testing.T) {
	b := newBench(t)
	b.cfg.Restore = true
	first := b.engine()
	pod, err := restore(b, first, b.restoring(first))
	if err != nil {
		t.Fatal(err)
	}
	s, err := first.sandboxes.Find(pod)
	if err != nil {
		t.Fatal(err)
	}
	s.Change(func(now *livePod) { now.Restoring = true }) // as if the last one was not
	if err := s.Put(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s.Now().Phase != records.Ready {
		t.Errorf("the pod is %s", s.Now().Phase)
	}
	for _, c := range first.Containers() {
		if err := first.StartContainer(t.Context(), c.ID); !errors.Is(err, fault.Unavailable) {
			t.Errorf("a start before all are restored: %v", err)
		}
	}
	b.close(first)
	second := b.engine()
	b.awaitCleanups(second)
	if len(second.Sandboxes())+len(second.Containers()) > 0 {
		t.Errorf("there are %d pods and %d containers", len(second.Sandboxes()), len(second.Containers()))
	}
	b.emptyOut()
	b.nothingLeft()
}
