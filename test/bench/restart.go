package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/kubelet"
	"github.com/crius-run/crius/internal/testkit/node"
	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/scene"
)

const (
	restartPerPod = 10
	restartRounds = 5
)

// restartRow kills the server of a node with many running containers, 1000
// unless CONTAINERS says otherwise, and measures until the next one has
// recovered them and answers.
func restartRow(ctx context.Context) (tables []table, err error) {
	count := 1000
	if text := os.Getenv("CONTAINERS"); text != "" {
		if count, err = strconv.Atoi(text); err != nil {
			return nil, fmt.Errorf("CONTAINERS: %w", err)
		}
	}
	w, err := scene.New(ctx, node.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	var side errgroup.Group
	side.SetLimit(4)
	for i := range max(count/restartPerPod, 1) {
		side.Go(func() error { return crowd(ctx, w, i) })
	}
	if err := side.Wait(); err != nil {
		return nil, err
	}
	var ready []float64
	listed := 0
	for range restartRounds {
		if err := w.Kill(); err != nil {
			return nil, err
		}
		began := time.Now()
		if err := w.Start(ctx); err != nil {
			return nil, err
		}
		list, err := w.Runtime().ListContainers(ctx, &cri.ListContainersRequest{
			Filter: &cri.ContainerFilter{State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}},
		})
		if err != nil {
			return nil, err
		}
		ready, listed = append(ready, time.Since(began).Seconds()), len(list.Containers)
	}
	t := table{
		title: fmt.Sprintf("Server killed beside %d running containers, %d times", listed, restartRounds),
		head:  []string{"", "p50 s"},
	}
	t.add("from exec to the first answer", fmt.Sprintf("%.2f", median(ready)))
	return []table{t}, nil
}

// crowd runs a pod with restartPerPod containers.
func crowd(ctx context.Context, w *scene.World, number int) error {
	config := kubelet.Pod(fmt.Sprint("p", number), kubelet.LogsBelow(w.Path("logs")))
	pod, err := w.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: "crun"})
	if err != nil {
		return err
	}
	for i := range restartPerPod {
		c, err := w.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{
			PodSandboxId: pod.PodSandboxId, SandboxConfig: config,
			Config: kubelet.Container(fmt.Sprint("c", i), images.Probe, []string{"sleep"}),
		})
		if err != nil {
			return err
		}
		if _, err := w.Runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.ContainerId}); err != nil {
			return err
		}
	}
	return nil
}
