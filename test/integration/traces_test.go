package integration

import (
	"fmt"
	"testing"

	"google.golang.org/grpc/metadata"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/collector"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// A kubelet's trace continues in the server, down to the steps of the work.
func TestTracesGoOnFromTheKubelet(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[tracing]\nendpoint = \"http://127.0.0.1:4317\""})
	wait.Retry(t, func() error { // a server that ends sends spans for a few seconds only
		err := w.traced(t)
		if err != nil {
			must(t, w.Start(t.Context()))
		}
		return err
	})
}

// traced runs and removes a pod with a trace, ends the server, and returns
// which spans a collector has not received.
func (w *world) traced(t *testing.T) error {
	t.Helper()
	l, err := w.Listen("127.0.0.1:4317") // in the node's own network
	must(t, err)
	c := collector.Serve(l)
	defer c.Close()
	const trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+trace+"-"+parent+"-01")
	config := w.podConfig(t)
	pod, err := w.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
	must(t, err)
	made, err := w.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: pod.PodSandboxId, SandboxConfig: config,
		Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "traced"}, Image: &cri.ImageSpec{Image: images.Probe}},
	})
	must(t, err)
	_, err = w.Runtime().ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: made.ContainerId}) // not traced
	must(t, err)
	_, err = w.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod.PodSandboxId})
	must(t, err, w.Stop()) // which sends what is left
	byID := map[string]collector.Span{}
	for _, s := range c.Spans() {
		byID[s.ID] = s
		equal(t, "trace of "+s.Name, s.Trace, trace)
	}
	lines := map[string]bool{}
	for _, s := range byID {
		line := s.Name
		for s.Parent != parent {
			next, ok := byID[s.Parent]
			if !ok {
				return fmt.Errorf("%s belongs to nothing", line)
			}
			s, line = next, next.Name+"/"+line
		}
		lines[line] = true
	}
	for _, want := range []string{
		"RunPodSandbox/run pod/attach network", "CreateContainer/create container/mount root file system",
		"CreateContainer/create container/runtime create", "RemovePodSandbox/remove pod/detach network",
	} {
		if !lines[want] {
			return fmt.Errorf("there is no %s in %v", want, lines)
		}
	}
	return nil
}
