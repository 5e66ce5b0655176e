package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/kubelet"
)

// client sends requests to any CRI server, as a kubelet does.
type client struct {
	conn    *grpc.ClientConn
	handler string
	image   string
	args    []string // of the image's entry point: what a container does until it is stopped
	probe   []string // command of an exec probe
	logs    string   // directory of the pods' logs
	cgroup  func(uid string) string

	mu   sync.Mutex
	pods map[string]*pod
}

// pod is a pod that is running or being made.
type pod struct {
	id        string
	config    *cri.PodSandboxConfig
	container string // id
}

func (c *client) runtime() cri.RuntimeServiceClient { return cri.NewRuntimeServiceClient(c.conn) }
func (c *client) images() cri.ImageServiceClient    { return cri.NewImageServiceClient(c.conn) }

// pod returns the pod with a name, or makes a new entry.
func (c *client) pod(name string) *pod {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pods[name]
	if p == nil {
		p = &pod{config: kubelet.Pod(name, kubelet.LogsBelow(c.logs), func(config *cri.PodSandboxConfig) {
			config.Linux.CgroupParent = c.cgroup(config.Metadata.Uid)
		})}
		if c.pods == nil {
			c.pods = map[string]*pod{}
		}
		c.pods[name] = p
	}
	return p
}

func (c *client) forget(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pods, name)
}

// do takes a pod through one phase.
func (c *client) do(ctx context.Context, name string, phase int) (seconds float64, err error) {
	p := c.pod(name)
	began := time.Now()
	switch phase {
	case runPodSandbox:
		err = insist(func() error {
			ran, err := c.runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: p.config, RuntimeHandler: c.handler})
			p.id = ran.GetPodSandboxId()
			return err
		})
	case createContainer:
		p.container, err = c.create(ctx, p, "c", c.args)
	case startContainer:
		_, err = c.runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: p.container})
	case execSync:
		_, err = c.exec(ctx, p, c.probe)
	case containerDown:
		_, err = c.runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: p.container})
		if err == nil {
			_, err = c.runtime().RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: p.container})
		}
	case podDown:
		if err = c.removePod(ctx, p.id); err == nil {
			c.forget(name)
		}
	}
	return time.Since(began).Seconds(), err
}

// create makes a container of the pod.
func (c *client) create(ctx context.Context, p *pod, name string, args []string) (string, error) {
	created, err := c.runtime().CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: p.id, SandboxConfig: p.config, Config: kubelet.Container(name, c.image, args),
	})
	return created.GetContainerId(), err
}

// exec runs a command in the pod's container, which must succeed.
func (c *client) exec(ctx context.Context, p *pod, command []string) (stdout string, err error) {
	said, err := c.runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: p.container, Cmd: command, Timeout: 60})
	if err == nil && said.ExitCode != 0 {
		err = fmt.Errorf("%q ends with code %d: %s", command, said.ExitCode, said.Stderr)
	}
	return string(said.GetStdout()), err
}

func (c *client) removePod(ctx context.Context, id string) error {
	err := insist(func() error {
		_, err := c.runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id})
		return err
	})
	if err != nil {
		return err
	}
	_, err = c.runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

// prove checks that a pod and its container are ready, also as seen by a
// program in the container.
func (c *client) prove(ctx context.Context, name string) error {
	p := c.pod(name)
	sandbox, err := c.runtime().PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: p.id})
	if err != nil {
		return err
	}
	if s := sandbox.Status; s.State != cri.PodSandboxState_SANDBOX_READY || s.GetNetwork().GetIp() == "" {
		return fmt.Errorf("pod %s is %s, and its address is %q", name, s.State, s.GetNetwork().GetIp())
	}
	container, err := c.runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: p.container})
	if err != nil {
		return err
	}
	if s := container.Status; s.State != cri.ContainerState_CONTAINER_RUNNING {
		return fmt.Errorf("the container of pod %s is %s: %s", name, s.State, s.Message)
	}
	_, err = c.exec(ctx, p, c.probe)
	return err
}

// removeAll removes all pods of the server.
func (c *client) removeAll(ctx context.Context) error {
	all, err := c.runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(8)
	for _, p := range all.Items {
		group.Go(func() error { return c.removePod(ctx, p.Id) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	left, err := c.runtime().ListContainers(ctx, &cri.ListContainersRequest{})
	if err == nil && len(left.Containers) > 0 {
		err = fmt.Errorf("%d containers are left without a pod", len(left.Containers))
	}
	return err
}

// running returns the number of running containers.
func (c *client) running(ctx context.Context) (int, error) {
	got, err := c.runtime().ListContainers(ctx, &cri.ListContainersRequest{
		Filter: &cri.ContainerFilter{State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}},
	})
	return len(got.GetContainers()), err
}

// pull pulls an image and checks that it is the one that was built, if that is
// known.
func (c *client) pull(ctx context.Context, name string, built *image.Artifact) error {
	spec := &cri.ImageSpec{Image: name}
	if _, err := c.images().PullImage(ctx, &cri.PullImageRequest{Image: spec}); err != nil {
		return err
	}
	got, err := c.images().ImageStatus(ctx, &cri.ImageStatusRequest{Image: spec})
	if err != nil || built == nil {
		return err
	}
	digest := "@" + built.Digest().String()
	if strings.TrimPrefix(got.Image.GetId(), "sha256:") != built.ID() ||
		!slices.ContainsFunc(got.Image.RepoDigests, func(d string) bool { return strings.HasSuffix(d, digest) }) {
		return fmt.Errorf("image %s is %v instead of %s%s", name, got.Image, built.ID(), digest)
	}
	return nil
}

// retreat removes the client's own remaining pods.
func (c *client) retreat(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for name, p := range c.pods {
		if p.id != "" {
			errs = append(errs, c.removePod(context.WithoutCancel(ctx), p.id))
		}
		delete(c.pods, name)
	}
	return errors.Join(errs...)
}

// version returns the server's name and version.
func (c *client) version(ctx context.Context) (string, error) {
	v, err := c.runtime().Version(ctx, &cri.VersionRequest{})
	return v.GetRuntimeName() + " " + v.GetRuntimeVersion(), err
}
