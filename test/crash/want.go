package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// This file does what a kubelet does after a failure: it tries again.

// wantPod retries until the pod runs, and checks that there is one.
func (s *stage) wantPod(ctx context.Context) error {
	err := s.runPod(ctx)
	if err == nil && !s.containerKilled {
		return s.onePod(ctx)
	}
	if err != nil && !s.containerKilled {
		return fmt.Errorf("RunPodSandbox again: %w", err)
	}
	// As a kubelet does: existing pods that are not ready are stopped and, in the
	// end, removed; another attempt replaces them.
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
			err := s.onePod(ctx)
			if err != nil && s.podDies(ctx) { // which crius did not know yet
				continue
			}
			return err
		}
		s.config.Metadata.Attempt++
		if err := s.runPod(ctx); err != nil {
			return fmt.Errorf("RunPodSandbox, attempt %d: %w", s.config.Metadata.Attempt, err)
		}
	}
}

// podDies reports whether the pod has stopped being ready, or soon does.
func (s *stage) podDies(ctx context.Context) bool {
	return wait.Until(ctx, func() bool {
		list, err := s.sandboxes(ctx)
		return err == nil && len(list) == 1 && list[0].State != cri.PodSandboxState_SANDBOX_READY
	})
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

// podWorks makes sure that a container can be run in the pod.
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

// wantContainer retries until the container exists, created or running.
func (s *stage) wantContainer(ctx context.Context) error {
	err := s.recreate(ctx)
	if s.containerKilled && status.Code(err) == codes.AlreadyExists {
		if err := s.nextAttempt(ctx); err != nil {
			return err
		}
		err = s.recreate(ctx)
	}
	if err != nil {
		return fmt.Errorf("CreateContainer again: %w", err)
	}
	return s.oneContainer(ctx)
}

// recreate is create, in another pod if this one has ended.
func (s *stage) recreate(ctx context.Context) error { return s.inReadyPod(ctx, (*stage).create) }

// inReadyPod tries once more in another pod if this one has ended: its own container, if it has
// one, was killed as well.
func (s *stage) inReadyPod(ctx context.Context, try act) error {
	err := try(s, ctx)
	if s.containerKilled && status.Code(err) == codes.FailedPrecondition {
		if err := s.wantPod(ctx); err != nil {
			return fmt.Errorf("another pod: %w", err)
		}
		err = try(s, ctx)
	}
	return err
}

// nextAttempt removes the container, if it exists.
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
	case !s.containerKilled && now.Reason != "StartError": // which a container does not survive
		return fmt.Errorf("StartContainer again: %w; it is %v, code %d, %s", err, now.State, now.ExitCode, now.Message)
	default:
		if err := s.renew(ctx); err != nil {
			return err
		}
	}
	return s.do(ctx, (*stage).wantExec, (*stage).oneContainer)
}

// renew replaces an ended container with another attempt.
func (s *stage) renew(ctx context.Context) error {
	if err := s.do(ctx, (*stage).nextAttempt, (*stage).recreate, (*stage).start); err != nil {
		return fmt.Errorf("another attempt: %w", err)
	}
	return nil
}

// again tries once more, in another attempt if the container has ended.
func (s *stage) again(ctx context.Context, what string, try act) error {
	err := try(s, ctx)
	if err != nil && s.containerKilled {
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
	var now *cri.ContainerStatus
	var err error
	if !wait.Until(ctx, func() bool {
		now, err = s.status(ctx)
		return err != nil || now.State == cri.ContainerState_CONTAINER_EXITED
	}) {
		return fmt.Errorf("it cannot be used and is still %v", now.State)
	}
	return err
}

// wantExec checks that a command answers, and that no command is left over.
func (s *stage) wantExec(ctx context.Context) error {
	return s.again(ctx, "ExecSync", (*stage).exec)
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
	fits := now.ExitCode == bySIGTERM || (s.containerKilled || s.failed) && now.ExitCode == bySIGKILL
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

func (s *stage) wantPodUpdated(ctx context.Context) error {
	if err := s.inReadyPod(ctx, (*stage).updatePod); err != nil {
		return fmt.Errorf("UpdatePodSandboxResources again: %w", err)
	}
	return nil
}

// wantRotated checks that the log continues in the new file where the old one
// ends.
func (s *stage) wantRotated(ctx context.Context) error {
	if err := s.reopen(ctx); err != nil && s.containerKilled {
		return s.awaitEnd(ctx) // nothing more is written
	} else if err != nil {
		return fmt.Errorf("ReopenContainerLog again: %w", err)
	}
	if err := s.speaks(ctx); err != nil {
		return err
	}
	if err := s.stopNow(ctx); err != nil { // so that no record is half-written
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

// images counts the images of that name.
func (s *stage) images(ctx context.Context, want int) error {
	resp, err := s.w.Images().ListImages(ctx, &cri.ListImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{Image: extraImage}}})
	if err == nil && len(resp.Images) != want {
		err = fmt.Errorf("want %d images, there are %v", want, resp.Images)
	}
	return err
}

// wantPulled retries until the image is present, and runs it.
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
