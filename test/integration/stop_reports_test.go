package integration

import (
	"fmt"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// Zombies that a container does not reap neither delay its stop nor outlive it.
func TestStopWithZombies_kubernetes_66892_moby_37627(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		for _, mode := range []cri.NamespaceMode{cri.NamespaceMode_POD, cri.NamespaceMode_CONTAINER} {
			forPod, forContainer := pidMode(mode)
			p := w.run(t, handler, forPod)
			c := p.start(t, "fork 3 exit 0 ; trap TERM ; exit 4", forContainer)
			c.says(t, "ready")
			wait.For(t, "zombies", func() bool { return len(w.processesOf(t, c.id))-len(w.aliveIn(t, c.id)) >= 3 })
			c.stop(t, scene.LimitSeconds)
			equal(t, "exit code", c.status(t).ExitCode, 4)
			wait.For(t, "the zombies to go", func() bool { return len(w.processesOf(t, c.id)) == 0 })
		}
	})
}

// A pod that is stopped while its containers are being created has none that runs afterwards, whichever of
// these comes first, and a container that was not created leaves nothing.
func TestPodIsStoppedWhileItsContainersAreCreated_kubernetes_98933(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		for range 5 {
			p := w.run(t, handler)
			first := p.start(t, "echo ready ; sleep")
			var group sync.WaitGroup
			created := make([]string, 3)
			begun := make(chan struct{}, len(created))
			for i := range created {
				name := fmt.Sprintf("more%d", i)
				config := first.config
				group.Go(func() {
					begun <- struct{}{}
					resp, err := w.Runtime().CreateContainer(t.Context(), &cri.CreateContainerRequest{
						PodSandboxId: p.id, SandboxConfig: p.config,
						Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: name}, Image: config.Image, Args: config.Args, LogPath: name, Linux: config.Linux},
					})
					if err != nil {
						wantCode(t, err, codes.FailedPrecondition)
						return
					}
					created[i] = resp.ContainerId
					_, err = w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: resp.ContainerId})
					if err != nil && status.Code(err) != codes.FailedPrecondition {
						t.Errorf("StartContainer: %v", err)
					}
				})
			}
			<-begun
			p.stop(t)
			group.Wait()
			resp, err := w.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: p.id}})
			must(t, err)
			for _, c := range resp.Containers {
				equal(t, c.Metadata.Name+" is in state", c.State, cri.ContainerState_CONTAINER_EXITED)
			}
			for _, id := range created {
				if id != "" {
					p.made = append(p.made, id)
				}
			}
			equal(t, "containers of the pod", len(resp.Containers), len(p.made)-1)
		}
	})
}
