package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// stage is a pod with a container, as far as they have come, seen by the
// kubelet that wants them.
type stage struct {
	w       *world
	handler string
	// containerKilled: a process of the container itself was killed, so that a kubelet
	// would make a new attempt.
	containerKilled bool
	// failed: a step failed, perhaps the stop signal.
	failed bool

	config    *cri.PodSandboxConfig
	container *cri.ContainerConfig
	pod, id   string
	halves    []half // see leaveHalfDone
}

func (w *world) stage(handler string, change ...podChange) *stage {
	w.pods++
	name := fmt.Sprintf("case-%d", w.pods)
	change = append([]podChange{kubelet.LogsBelow(w.Path("logs"))}, change...)
	return &stage{
		w: w, handler: handler,
		config:    kubelet.Pod(name, change...),
		container: kubelet.Container("c", images.Probe, scene.Steps("lines 1000000000 50ms")),
	}
}

func (s *stage) runtime() cri.RuntimeServiceClient { return s.w.Runtime() }

func (s *stage) runPod(ctx context.Context) error {
	resp, err := s.runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: s.config, RuntimeHandler: s.handler})
	if err != nil {
		return err
	}
	s.pod = resp.PodSandboxId
	return nil
}

func (s *stage) create(ctx context.Context) error {
	resp, err := s.runtime().CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: s.pod, Config: s.container, SandboxConfig: s.config})
	if err != nil {
		return err
	}
	s.id = resp.ContainerId
	return nil
}

func (s *stage) start(ctx context.Context) error {
	_, err := s.runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: s.id})
	return err
}

func (s *stage) stop(ctx context.Context) error {
	_, err := s.runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: s.id, Timeout: s.grace()})
	return err
}

// grace returns how long the container may take, in seconds: it ends at once
// unless the disturbance keeps the stop signal from it.
func (s *stage) grace() int64 {
	if s.containerKilled || s.failed {
		return 1
	}
	return scene.LimitSeconds
}

func (s *stage) remove(ctx context.Context) error {
	_, err := s.runtime().RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: s.id})
	return err
}

func (s *stage) stopPod(ctx context.Context) error {
	_, err := s.runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: s.pod})
	return err
}

func (s *stage) removePod(ctx context.Context) error {
	_, err := s.runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: s.pod})
	return err
}

func (s *stage) status(ctx context.Context) (*cri.ContainerStatus, error) {
	resp, err := s.runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: s.id})
	if err != nil {
		return nil, err
	}
	return resp.Status, nil
}

// do runs in for this stage.
func (s *stage) do(ctx context.Context, all ...act) error { return in(all...)(s, ctx) }

// sandboxes returns the pods with the stage's name, of any attempt.
func (s *stage) sandboxes(ctx context.Context) ([]*cri.PodSandbox, error) {
	resp, err := s.runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{
		LabelSelector: map[string]string{"io.kubernetes.pod.uid": s.config.Metadata.Uid},
	}})
	return resp.GetItems(), err
}

// containers returns those of the stage's pod, of any attempt.
func (s *stage) containers(ctx context.Context) ([]*cri.Container, error) {
	resp, err := s.runtime().ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: s.pod}})
	return resp.GetContainers(), err
}

func (s *stage) stopNow(ctx context.Context) error {
	_, err := s.runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: s.id})
	return err
}

func (s *stage) exec(ctx context.Context) error {
	resp, err := s.runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: s.id, Cmd: []string{"/probe", "echo", "hello"}, Timeout: scene.LimitSeconds})
	if err != nil {
		return err
	}
	if string(resp.Stdout) != "hello\n" || resp.ExitCode != 0 {
		return fmt.Errorf("the command answered %d, %q and %q", resp.ExitCode, resp.Stdout, resp.Stderr)
	}
	return nil
}

// running makes a pod with a container that is running and has reported it:
// before its program has taken over, a signal reaches the runtime's init or a
// program without a handler. The kernel does not kill those as PID 1, and the
// Go runtime then ends them with code 2.
func (s *stage) running(ctx context.Context) error {
	return s.do(ctx, (*stage).runPod, (*stage).create, (*stage).start, (*stage).speaks)
}

// speaks waits for the first line of the container.
func (s *stage) speaks(ctx context.Context) error {
	if !wait.Until(ctx, func() bool { info, err := os.Stat(s.logFile()); return err == nil && info.Size() > 0 }) {
		return fmt.Errorf("the container has written nothing to %s", s.logFile())
	}
	return nil
}

// wantsVolume makes an image a volume of the next container.
func (s *stage) wantsVolume(context.Context) error {
	s.container.Mounts = []*cri.Mount{{ContainerPath: "/volume", Readonly: true, Image: &cri.ImageSpec{Image: extraImage}}}
	return nil
}

// cpuShares is requested by an update.
const cpuShares = 333

func (s *stage) update(ctx context.Context) error {
	_, err := s.runtime().UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{
		ContainerId: s.id, Linux: &cri.LinuxContainerResources{CpuShares: cpuShares, OomScoreAdj: 900},
	})
	return err
}

func (s *stage) updatePod(ctx context.Context) error {
	_, err := s.runtime().UpdatePodSandboxResources(ctx, &cri.UpdatePodSandboxResourcesRequest{
		PodSandboxId: s.pod, Resources: &cri.LinuxContainerResources{CpuShares: cpuShares},
	})
	return err
}

func (s *stage) logFile() string { return filepath.Join(s.config.LogDirectory, s.container.LogPath) }

// rotate does what a kubelet does with a log that has grown.
func (s *stage) rotate(ctx context.Context) error {
	if err := os.Rename(s.logFile(), s.logFile()+".1"); err != nil {
		return err
	}
	return s.reopen(ctx)
}

func (s *stage) reopen(ctx context.Context) error {
	_, err := s.runtime().ReopenContainerLog(ctx, &cri.ReopenContainerLogRequest{ContainerId: s.id})
	return err
}

func (s *stage) pull(ctx context.Context) error {
	_, err := s.w.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: extraImage}})
	return err
}

func (s *stage) removeImage(ctx context.Context) error {
	_, err := s.w.Images().RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: extraImage}})
	return err
}

func (s *stage) useExtra() {
	s.container.Image = &cri.ImageSpec{Image: extraImage, UserSpecifiedImage: extraImage}
}

// strike removes everything except the bystanders.
func (w *world) strike(ctx context.Context) error {
	list, err := w.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	for _, p := range list.Items {
		if strings.HasPrefix(p.Metadata.Name, "bystander-") {
			continue
		}
		s := &stage{w: w, pod: p.Id}
		if err := s.do(ctx, (*stage).stopPod, (*stage).removePod); err != nil {
			return fmt.Errorf("pod %s: %w", p.Metadata.Name, err)
		}
	}
	if err := (&stage{w: w}).removeImages(ctx); err != nil {
		return err
	}
	logs, err := filepath.Glob(w.Path("logs", "default_case-*"))
	for _, dir := range logs {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}
