package pod

import (
	"context"
	"errors"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A kubelet that gives up a start finds the container running, and does not have another attempt started beside
// it. When the start ends, the container is what it has become.
func TestStartThatItsCallerGivesUp_kubernetes_139670_kubernetes_122585(t *testing.T) {
	for _, fails := range []error{nil, errInjected} {
		timeless(t, func(t *testing.T, b *bench) {
			e := b.engine()
			pod := b.run(e, "a")
			id := b.create(e, pod, "c")
			release := make(chan struct{})
			b.node.set(func() { b.node.block["start"], b.node.fail["start"] = release, fails })
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := e.StartContainer(ctx, id); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("start: %v", err)
			}
			if v, _ := e.Container(id); v.State != cri.ContainerState_CONTAINER_RUNNING || v.StartedAt.IsZero() {
				t.Errorf("while it is started: %s since %v", v.State, v.StartedAt)
			}
			close(release)
			want := cri.ContainerState_CONTAINER_RUNNING
			if fails != nil {
				want = cri.ContainerState_CONTAINER_EXITED
			}
			time.Sleep(time.Second)
			if v, _ := e.Container(id); v.State != want {
				t.Errorf("afterwards: %s, want %s", v.State, want)
			}
			if c, err := e.containers.Find(id); err != nil || c.Now().starting || !c.Now().abandoned.IsZero() {
				t.Errorf("the start has not ended: %v", err)
			}
			b.remove(e, pod)
			b.nothingLeft()
		})
	}
}
