package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/kubelet"
	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/scene"
)

// stage is a pod with a container, as far as they have come, seen by the kubelet
// that wants them.
type stage struct {
	w       *world
	handler string
	// harsh: something of the container itself was killed, so that a new attempt
	// is what a kubelet would make.
	harsh bool
	// failed: a step failed, perhaps the stop signal.
	failed bool

	config    *cri.PodSandboxConfig
	container *cri.ContainerConfig
	pod, id   string
	output    string // of the command that was run in the container
	halves    []half // see mess
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
	_, err := s.runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: s.id, Timeout: 10})
	return err
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

// do is in, for this stage.
func (s *stage) do(ctx context.Context, all ...act) error { return in(all...)(s, ctx) }

// sandboxes are the pods of the stage's name, whatever their attempt.
func (s *stage) sandboxes(ctx context.Context) ([]*cri.PodSandbox, error) {
	resp, err := s.runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{
		LabelSelector: map[string]string{"io.kubernetes.pod.uid": s.config.Metadata.Uid},
	}})
	return resp.GetItems(), err
}

// containers are those of the stage's pod, whatever their attempt.
func (s *stage) containers(ctx context.Context) ([]*cri.Container, error) {
	resp, err := s.runtime().ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: s.pod}})
	return resp.GetContainers(), err
}

// wantPod retries until the pod runs, and checks that there is one.
func (s *stage) wantPod(ctx context.Context) error {
	err := s.runPod(ctx)
	if err == nil && !s.harsh {
		return s.onePod(ctx)
	}
	if err != nil && !s.harsh {
		return fmt.Errorf("RunPodSandbox again: %w", err)
	}
	// As a kubelet does it: what is there and not ready is stopped and, in the
	// end, removed; another attempt takes its place.
	for {
		list, err := s.sandboxes(ctx)
		if err != nil {
			return err
		}
		ready := 0
		for _, p := range list {
			if p.State == cri.PodSandboxState_SANDBOX_READY {
				ready++
				continue
			}
			s.pod = p.Id
			if err := s.do(ctx, (*stage).stopPod, (*stage).removePod); err != nil {
				return fmt.Errorf("the attempt that failed: %w", err)
			}
		}
		if ready > 0 {
			break
		}
		s.config.Metadata.Attempt++
		if err := s.runPod(ctx); err != nil {
			return fmt.Errorf("RunPodSandbox, attempt %d: %w", s.config.Metadata.Attempt, err)
		}
	}
	return s.onePod(ctx)
}

func (s *stage) onePod(ctx context.Context) error {
	list, err := s.sandboxes(ctx)
	if err != nil {
		return err
	}
	if len(list) != 1 || list[0].State != cri.PodSandboxState_SANDBOX_READY {
		return fmt.Errorf("want one pod that is ready, there are %v", list)
	}
	s.pod = list[0].Id
	return s.podWorks(ctx)
}

// podWorks sees to it that a container can be run in the pod.
func (s *stage) podWorks(ctx context.Context) error {
	work := *s
	work.container = kubelet.Container("after", images.Probe, scene.Steps("sleep"))
	if err := work.do(ctx, (*stage).create, (*stage).start, (*stage).exec); err != nil {
		return fmt.Errorf("in the pod: %w", err)
	}
	if err := work.do(ctx, (*stage).stopNow, (*stage).remove); err != nil {
		return fmt.Errorf("in the pod: %w", err)
	}
	return nil
}

func (s *stage) stopNow(ctx context.Context) error {
	_, err := s.runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: s.id})
	return err
}

// wantContainer retries until the container is there, created or running.
func (s *stage) wantContainer(ctx context.Context) error {
	err := s.create(ctx)
	if s.harsh && status.Code(err) == codes.AlreadyExists {
		if err := s.nextAttempt(ctx); err != nil {
			return err
		}
		err = s.create(ctx)
	}
	if err != nil {
		return fmt.Errorf("CreateContainer again: %w", err)
	}
	return s.oneContainer(ctx)
}

// nextAttempt removes what is there of the container.
func (s *stage) nextAttempt(ctx context.Context) error {
	list, err := s.containers(ctx)
	if err != nil {
		return err
	}
	for _, c := range list {
		s.id = c.Id
		if err := s.remove(ctx); err != nil {
			return fmt.Errorf("the attempt that failed: %w", err)
		}
	}
	s.container.Metadata.Attempt++
	return nil
}

func (s *stage) oneContainer(ctx context.Context) error {
	list, err := s.containers(ctx)
	if err != nil {
		return err
	}
	if len(list) != 1 || list[0].Id != s.id {
		return fmt.Errorf("want one container, %s, there are %v", s.id, list)
	}
	return nil
}

// wantRunning retries until the container runs and answers.
func (s *stage) wantRunning(ctx context.Context) error {
	now, err := s.status(ctx)
	if err != nil {
		return err
	}
	if now.State == cri.ContainerState_CONTAINER_CREATED {
		err = s.start(ctx)
	}
	switch {
	case err == nil && now.State != cri.ContainerState_CONTAINER_EXITED:
	case !s.harsh && now.Reason != "StartError": // which a container does not survive
		return fmt.Errorf("StartContainer again: %w; it is %v, code %d, %s", err, now.State, now.ExitCode, now.Message)
	default:
		if err := s.renew(ctx); err != nil {
			return err
		}
	}
	return s.do(ctx, (*stage).wantExec, (*stage).oneContainer)
}

// renew puts another attempt in the place of a container that has ended.
func (s *stage) renew(ctx context.Context) error {
	if err := s.do(ctx, (*stage).nextAttempt, (*stage).create, (*stage).start); err != nil {
		return fmt.Errorf("another attempt: %w", err)
	}
	return nil
}

// again tries once more, in another attempt if the container has ended.
func (s *stage) again(ctx context.Context, what string, try act) error {
	err := try(s, ctx)
	if err != nil && s.harsh {
		if err := s.awaitEnd(ctx); err != nil {
			return err
		}
		if err = s.renew(ctx); err == nil {
			err = try(s, ctx)
		}
	}
	if err != nil {
		return fmt.Errorf("%s again: %w", what, err)
	}
	return nil
}

// awaitEnd waits until crius knows that the container has ended.
func (s *stage) awaitEnd(ctx context.Context) error {
	for deadline := time.Now().Add(scene.Patience); ; time.Sleep(10 * time.Millisecond) {
		now, err := s.status(ctx)
		if err != nil || now.State == cri.ContainerState_CONTAINER_EXITED {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("it cannot be used and is still %v", now.State)
		}
	}
}

func (s *stage) exec(ctx context.Context) error {
	resp, err := s.runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: s.id, Cmd: []string{"/probe", "echo", "hello"}, Timeout: 60})
	if err != nil {
		return err
	}
	s.output = string(resp.Stdout)
	if s.output != "hello\n" || resp.ExitCode != 0 {
		return fmt.Errorf("the command answered %d, %q and %q", resp.ExitCode, resp.Stdout, resp.Stderr)
	}
	return nil
}

// running makes a pod with a container that runs.
func (s *stage) running(ctx context.Context) error {
	return s.do(ctx, (*stage).runPod, (*stage).create, (*stage).start)
}

// wantExec checks that a command answers, and that no command is left over.
func (s *stage) wantExec(ctx context.Context) error {
	return s.again(ctx, "ExecSync", (*stage).exec)
}

// wantsVolume makes an image a volume of the container that is to come.
func (s *stage) wantsVolume(context.Context) error {
	s.container.Mounts = []*cri.Mount{{ContainerPath: "/volume", Readonly: true, Image: &cri.ImageSpec{Image: extraImage}}}
	return nil
}

// wantStopped retries until the container has ended.
func (s *stage) wantStopped(ctx context.Context) error {
	if err := s.stop(ctx); err != nil {
		return fmt.Errorf("StopContainer again: %w", err)
	}
	now, err := s.status(ctx)
	if err != nil {
		return err
	}
	const bySIGTERM, bySIGKILL = 128 + 15, 128 + 9
	fits := now.ExitCode == bySIGTERM || (s.harsh || s.failed) && now.ExitCode == bySIGKILL
	if now.State != cri.ContainerState_CONTAINER_EXITED || !fits {
		return fmt.Errorf("it was stopped and is %v, code %d", now.State, now.ExitCode)
	}
	return nil
}

// wantRemoved retries until the container is gone.
func (s *stage) wantRemoved(ctx context.Context) error {
	if err := s.remove(ctx); err != nil {
		return fmt.Errorf("RemoveContainer again: %w", err)
	}
	if list, err := s.containers(ctx); err != nil || len(list) > 0 {
		return fmt.Errorf("it was removed, there are %v (%w)", list, err)
	}
	return nil
}

func (s *stage) wantPodStopped(ctx context.Context) error {
	if err := s.stopPod(ctx); err != nil {
		return fmt.Errorf("StopPodSandbox again: %w", err)
	}
	list, err := s.sandboxes(ctx)
	if err != nil {
		return err
	}
	if len(list) != 1 || list[0].State != cri.PodSandboxState_SANDBOX_NOTREADY {
		return fmt.Errorf("want one pod that is not ready, there are %v", list)
	}
	now, err := s.status(ctx)
	if err == nil && now.State != cri.ContainerState_CONTAINER_EXITED {
		err = fmt.Errorf("the pod was stopped, its container is %v", now.State)
	}
	return err
}

func (s *stage) wantPodRemoved(ctx context.Context) error {
	if err := s.removePod(ctx); err != nil {
		return fmt.Errorf("RemovePodSandbox again: %w", err)
	}
	if list, err := s.sandboxes(ctx); err != nil || len(list) > 0 {
		return fmt.Errorf("it was removed, there are %v (%w)", list, err)
	}
	return nil
}

// cpuShares is what an update asks for.
const cpuShares = 333

func (s *stage) update(ctx context.Context) error {
	_, err := s.runtime().UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{
		ContainerId: s.id, Linux: &cri.LinuxContainerResources{CpuShares: cpuShares, OomScoreAdj: 900},
	})
	return err
}

func (s *stage) wantUpdated(ctx context.Context) error {
	if err := s.again(ctx, "UpdateContainerResources", (*stage).update); err != nil {
		return err
	}
	now, err := s.status(ctx)
	if err != nil {
		return err
	}
	if got := now.Resources.GetLinux().GetCpuShares(); got != cpuShares {
		return fmt.Errorf("status says %d CPU shares", got)
	}
	file := filepath.Join("/sys/fs/cgroup/cpu", s.w.CgroupParent(), "crius-"+s.id, "cpu.shares")
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if got := strings.TrimSpace(string(text)); got != fmt.Sprint(cpuShares) {
		return fmt.Errorf("%s says %s", file, got)
	}
	return nil
}

func (s *stage) updatePod(ctx context.Context) error {
	_, err := s.runtime().UpdatePodSandboxResources(ctx, &cri.UpdatePodSandboxResourcesRequest{
		PodSandboxId: s.pod, Resources: &cri.LinuxContainerResources{CpuShares: cpuShares},
	})
	return err
}

func (s *stage) wantPodUpdated(ctx context.Context) error {
	if err := s.updatePod(ctx); err != nil {
		return fmt.Errorf("UpdatePodSandboxResources again: %w", err)
	}
	return nil
}

func (s *stage) logFile() string { return filepath.Join(s.config.LogDirectory, s.container.LogPath) }

// rotate is what a kubelet does with a log that has grown.
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

// wantRotated checks that the log goes on in the new file where the old ends.
func (s *stage) wantRotated(ctx context.Context) error {
	if err := s.reopen(ctx); err != nil && s.harsh {
		return s.awaitEnd(ctx) // nothing more is written
	} else if err != nil {
		return fmt.Errorf("ReopenContainerLog again: %w", err)
	}
	if !scene.Eventually(func() bool { info, err := os.Stat(s.logFile()); return err == nil && info.Size() > 0 }) {
		return errors.New("nothing is written to the new log")
	}
	if err := s.stopNow(ctx); err != nil { // so that no record is half written
		return err
	}
	n := 0
	for _, file := range []string{s.logFile() + ".1", s.logFile()} {
		err := kubelet.ScanLog(file, func(r kubelet.LogRecord) error {
			n++
			if r.Content != fmt.Sprintf("line %d", n) {
				return fmt.Errorf("%q is no line %d", r.Content, n)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *stage) pull(ctx context.Context) error {
	_, err := s.w.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: extraImage}})
	return err
}

func (s *stage) removeImage(ctx context.Context) error {
	_, err := s.w.Images().RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: extraImage}})
	return err
}

// images counts those of the name.
func (s *stage) images(ctx context.Context, want int) error {
	resp, err := s.w.Images().ListImages(ctx, &cri.ListImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{Image: extraImage}}})
	if err == nil && len(resp.Images) != want {
		err = fmt.Errorf("want %d images, there are %v", want, resp.Images)
	}
	return err
}

// wantPulled retries until the image is there, and runs it.
func (s *stage) wantPulled(ctx context.Context) error {
	if err := s.pull(ctx); err != nil {
		return fmt.Errorf("PullImage again: %w", err)
	}
	if err := s.images(ctx, 1); err != nil {
		return err
	}
	s.useExtra()
	s.container.Args = scene.Steps("cat /etc/extra")
	return s.do(ctx, (*stage).runPod, (*stage).create, (*stage).start, (*stage).finish)
}

func (s *stage) useExtra() {
	s.container.Image = &cri.ImageSpec{Image: extraImage, UserSpecifiedImage: extraImage}
}

// finish waits for the container's end, which must be a good one.
func (s *stage) finish(ctx context.Context) error {
	if err := s.awaitEnd(ctx); err != nil {
		return err
	}
	now, err := s.status(ctx)
	if err != nil {
		return err
	}
	if now.ExitCode != 0 {
		return fmt.Errorf("it is %v, code %d, %s", now.State, now.ExitCode, now.Message)
	}
	return nil
}

func (s *stage) wantNoImage(ctx context.Context) error {
	if err := s.removeImage(ctx); err != nil {
		return fmt.Errorf("RemoveImage again: %w", err)
	}
	return s.images(ctx, 0)
}

// usesExtra makes a container of the image that nothing else uses.
func (s *stage) usesExtra(ctx context.Context) error {
	s.useExtra()
	return s.do(ctx, (*stage).pull, (*stage).running)
}

// strike takes down everything but the bystanders.
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
	if err := (&stage{w: w}).removeImage(ctx); err != nil {
		return err
	}
	logs, err := filepath.Glob(w.Path("logs", "default_case-*"))
	for _, dir := range logs {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}
