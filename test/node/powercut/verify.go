package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
)

// node is the crius of this machine and what it serves.
type node struct {
	cri.RuntimeServiceClient
	cri.ImageServiceClient
	images []*served
	log    string
	busy   [16]sync.Mutex // by image
}

// connect waits for the first answer.
func (n *node) connect(ctx context.Context, ended <-chan error) error {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	n.RuntimeServiceClient, n.ImageServiceClient = cri.NewRuntimeServiceClient(conn), cri.NewImageServiceClient(conn)
	wait.Until(ctx, func() bool {
		if _, err = n.Version(ctx, &cri.VersionRequest{}); err == nil {
			return true
		}
		select {
		case end := <-ended:
			err = fmt.Errorf("it ended: %w", end)
			return true
		default:
			conn.ResetConnectBackoff()
			return false
		}
	})
	return err
}

// verify checks that the node is as it should be after a boot.
func (n *node) verify(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*wait.Limit)
	defer cancel()
	pods, containers, err := n.clear(ctx)
	if err != nil {
		return err
	}
	if err := settle(ctx); err != nil {
		return fmt.Errorf("after all pods of the last boot were removed: %w", err)
	}
	present, err := n.present(ctx)
	if err != nil {
		return err
	}
	for _, name := range wanted() {
		if !slices.ContainsFunc(present, func(s *served) bool { return s.Name == name }) {
			return fmt.Errorf("image %s was pulled, and is gone", name)
		}
	}
	if err := n.try(ctx, present); err != nil {
		return err
	}
	if err := settle(ctx); err != nil {
		return fmt.Errorf("after the images were tried: %w", err)
	}
	log, err := os.ReadFile(n.log)
	if err != nil {
		return err
	}
	aside := strings.Count(string(log), "set aside") + strings.Count(string(log), "moved aside")
	if aside > 0 {
		fmt.Printf("crius's log, because something was set aside:\n%s\n", log)
	}
	tell("verified %d %d %d %d", len(present), aside, pods, containers)
	return nil
}

// clear removes what existed when the power was cut. All of it is dead.
func (n *node) clear(ctx context.Context) (pods, containers int, err error) {
	listed, err := n.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return 0, 0, err
	}
	for _, c := range listed.Containers {
		if c.State != cri.ContainerState_CONTAINER_EXITED {
			return 0, 0, fmt.Errorf("container %s of an earlier boot is %v", c.Id, c.State)
		}
		if _, err := n.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.Id, Verbose: true}); err != nil {
			return 0, 0, err
		}
	}
	sandboxes, err := n.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return 0, 0, err
	}
	for _, p := range sandboxes.Items {
		if p.State != cri.PodSandboxState_SANDBOX_NOTREADY {
			return 0, 0, fmt.Errorf("pod %s of an earlier boot is %v", p.Id, p.State)
		}
	}
	for _, p := range sandboxes.Items {
		if _, err := n.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.Id}); err != nil {
			return 0, 0, err
		}
		if _, err := n.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.Id}); err != nil {
			return 0, 0, err
		}
	}
	return len(sandboxes.Items), len(listed.Containers), nil
}

// present returns the listed images, and fails for one that is not ours.
func (n *node) present(ctx context.Context) ([]*served, error) {
	listed, err := n.ListImages(ctx, &cri.ListImagesRequest{})
	if err != nil {
		return nil, err
	}
	var present []*served
	for _, image := range listed.Images {
		at := slices.IndexFunc(n.images, func(s *served) bool { return s.ID == strings.TrimPrefix(image.Id, "sha256:") })
		if at < 0 {
			return nil, fmt.Errorf("image %v is none of ours", image)
		}
		one := n.images[at]
		digest := address + "/" + one.Name + "@" + one.Digest
		if len(image.RepoDigests)+len(image.RepoTags) == 0 && !slices.Contains(wanted(), one.Name) {
			// containers/image assigns the name last: this pull had not returned. The
			// image is complete, and the next pull, or the kubelet's garbage
			// collection, handles it.
			present = append(present, one)
			continue
		}
		if !slices.Contains(image.RepoDigests, digest) || !slices.Contains(image.RepoTags, one.ref()) {
			return nil, fmt.Errorf("image %s has the names %q and %q", one.Name, image.RepoTags, image.RepoDigests)
		}
		present = append(present, one)
	}
	return present, nil
}

// try runs every image, which compares its content with what was pulled.
func (n *node) try(ctx context.Context, present []*served) (err error) {
	if len(present) == 0 {
		return nil
	}
	config := kubelet.Pod("verify", kubelet.LogsBelow("/run/logs"))
	pod, err := n.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: "crun"})
	if err != nil {
		return fmt.Errorf("a pod cannot run: %w", err)
	}
	id := pod.PodSandboxId
	for _, one := range present {
		if err := n.tryOne(ctx, id, config, one); err != nil {
			return fmt.Errorf("image %s: %w", one.Name, err)
		}
	}
	_, err = n.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id})
	if err == nil {
		_, err = n.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id})
	}
	return err
}

func (n *node) tryOne(ctx context.Context, pod string, config *cri.PodSandboxConfig, one *served) error {
	c := kubelet.Container(one.Name, one.ID, []string{"check", one.Sum})
	made, err := n.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: config})
	if err != nil {
		return err
	}
	if _, err := n.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: made.ContainerId}); err != nil {
		return err
	}
	var answer *cri.ContainerStatusResponse
	exited := wait.Until(ctx, func() bool {
		answer, err = n.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: made.ContainerId})
		return err != nil || answer.Status.State == cri.ContainerState_CONTAINER_EXITED
	})
	if err != nil {
		return err
	}
	output, err := os.ReadFile(filepath.Join(config.LogDirectory, c.LogPath))
	if err != nil {
		return err
	}
	if !exited || answer.Status.ExitCode != 0 || !strings.Contains(string(output), "whole: ") {
		return fmt.Errorf("it is damaged (%v, exit code %d):\n%s", answer.Status.State, answer.Status.ExitCode, output)
	}
	return nil
}

// settle waits until nothing of any pod is left, and the store has no orphans.
func settle(ctx context.Context) (err error) {
	wait.Until(ctx, func() bool { err = errors.Join(remains(), orphans()); return err == nil })
	return err
}

// remains checks that nothing of pods is left.
func remains() error {
	var left []string
	for _, pattern := range []string{
		leases + "/*/*[.:]*",
		stateDir + "/pods/*", stateDir + "/containers/*", runDir + "/pods/*", runDir + "/containers/*",
		"/run/netns/*", "/run/ipcns/*", "/run/utsns/*",
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		for _, path := range found {
			if name := filepath.Base(path); !strings.HasPrefix(name, "last_reserved_ip") && name != "damaged" {
				content, _ := os.ReadFile(path)
				left = append(left, fmt.Sprintf("%s %.80q", path, content))
			}
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); strings.HasPrefix(f[4], runDir+"/") || strings.HasPrefix(f[4], stateDir+"/") {
			left = append(left, strings.TrimSpace(line))
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("these are left over:\n%s", strings.Join(left, "\n"))
	}
	return nil
}
