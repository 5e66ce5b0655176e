package pod

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/view"
)

// Readers find a dead pod not ready while a creation in it hangs, and do not wait for that: the
// creation is called off, and says why.
func TestReadersSeeADeadPodAtOnce(t *testing.T) {
	for name, read := range map[string]func(e *Engine, pod string) *view.Sandbox{
		"status": func(e *Engine, pod string) *view.Sandbox {
			v, err := e.Sandbox(pod)
			if err != nil {
				t.Error(err)
			}
			return v
		},
		"list": func(e *Engine, _ string) *view.Sandbox { return e.Sandboxes()[0] },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			e := b.engine()
			pod := b.run(e, "a")
			if v := read(e, pod); v.State != cri.PodSandboxState_SANDBOX_READY {
				t.Errorf("state before: %s", v.State)
			}
			b.node.block["create"] = make(chan struct{})
			created := make(chan error, 1)
			go func() {
				_, err := e.CreateContainer(context.Background(), pod, containerConfig("c"), nil)
				created <- err
			}()
			b.awaitCalls("create", 1)
			if err := unix.Unmount(filepath.Join(b.cfg.NamespacesDir, "utsns", "crius-"+pod), 0); err != nil {
				t.Fatal(err)
			}
			if v := read(e, pod); v.State != cri.PodSandboxState_SANDBOX_NOTREADY || len(v.IPs) > 0 {
				t.Errorf("state after: %s, %q", v.State, v.IPs)
			}
			if err := <-created; !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "nothing is pinned") {
				t.Errorf("creation ended with %v", err)
			}
			b.remove(e, pod)
			b.nothingLeft()
		})
	}
}
