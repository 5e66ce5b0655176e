package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
)

// load works at random until the power is cut: images come and go, pods too,
// and another program fills the page cache with unwritten data.
func (n *node) load(ctx context.Context, random *rand.Rand) error {
	failed := make(chan error)
	for _, work := range []func(context.Context, *rand.Rand) error{
		n.pullAndRemove, n.pullAndRemove, n.pods, scribble,
	} {
		own := rand.New(rand.NewPCG(random.Uint64(), 1))
		go func() {
			for {
				if err := work(ctx, own); err != nil {
					failed <- err
				}
			}
		}()
	}
	return <-failed
}

// pullAndRemove pulls an image, and sometimes removes it first. The host is
// told what is promised: no power cut undoes a pull that has returned.
func (n *node) pullAndRemove(ctx context.Context, random *rand.Rand) error {
	at := random.IntN(len(n.images))
	n.busy[at].Lock()
	defer n.busy[at].Unlock()
	one := n.images[at]
	spec := &cri.ImageSpec{Image: one.ref()}
	if random.IntN(2) == 0 {
		tell("removing %s", one.Name)
		_, err := n.RemoveImage(ctx, &cri.RemoveImageRequest{Image: spec})
		if err != nil && status.Code(err) != codes.FailedPrecondition { // a container has it
			return fmt.Errorf("remove image %s: %w", one.Name, err)
		}
	}
	if random.IntN(6) == 0 {
		return nil // and leave it to the next one
	}
	answer, err := n.PullImage(ctx, &cri.PullImageRequest{Image: spec})
	if err != nil {
		return fmt.Errorf("pull image %s: %w", one.Name, err)
	}
	if answer.ImageRef == "" {
		return fmt.Errorf("pull of image %s returns nothing", one.Name)
	}
	tell("pulled %s", one.Name)
	return nil
}

// pods runs a pod with a container or two, for a while or permanently.
func (n *node) pods(ctx context.Context, random *rand.Rand) error {
	config := kubelet.Pod("load", kubelet.LogsBelow("/run/logs"))
	handler := []string{"runc", "crun"}[random.IntN(2)]
	pod, err := n.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
	if err != nil {
		return fmt.Errorf("run a pod: %w", err)
	}
	for i := range 1 + random.IntN(2) {
		one := n.images[random.IntN(len(n.images))]
		args := [][]string{{"sleep"}, {"write"}, {"exit", "5"}}[random.IntN(3)]
		c := kubelet.Container(fmt.Sprint("c", i), one.ref(), args)
		made, err := n.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod.PodSandboxId, Config: c, SandboxConfig: config})
		if err != nil {
			continue // the image is gone, which is not an error
		}
		if random.IntN(4) > 0 {
			if _, err := n.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: made.ContainerId}); err != nil {
				return fmt.Errorf("start a container: %w", err)
			}
		}
		if random.IntN(3) == 0 {
			if _, err := n.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: made.ContainerId}); err != nil {
				return fmt.Errorf("stop a container: %w", err)
			}
		}
	}
	if random.IntN(3) == 0 {
		return nil
	}
	if _, err := n.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod.PodSandboxId}); err != nil {
		return fmt.Errorf("stop a pod: %w", err)
	}
	if _, err := n.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod.PodSandboxId}); err != nil {
		return fmt.Errorf("remove a pod: %w", err)
	}
	return nil
}

// scribble writes its own files, mostly without ever syncing.
func scribble(_ context.Context, random *rand.Rand) error {
	dir := filepath.Join(disk, "scribble")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	path := filepath.Join(dir, fmt.Sprint(random.IntN(8)))
	f, err := os.Create(path + ".new")
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, random.IntN(2<<20))); err != nil {
		return err
	}
	if random.IntN(8) == 0 {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	time.Sleep(time.Duration(random.IntN(100)) * time.Millisecond)
	return os.Rename(path+".new", path)
}
