package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/storage/checkpoint"
	"github.com/crius-run/crius/test/scene"
)

// criuHandler is the only one whose runtime, as Debian has it, can dump containers.
const criuHandler = "runc"

// out is the directory for the stage's checkpoints.
func (s *stage) out() (string, error) {
	dir := s.w.Path("tmp", "checkpoints-"+s.config.Metadata.Name)
	return dir, os.MkdirAll(dir, 0o700)
}

const archive = "archive.tar"

func (s *stage) checkpoint(ctx context.Context) error {
	dir, err := s.out()
	if err != nil {
		return err
	}
	_, err = s.runtime().CheckpointContainer(ctx, &cri.CheckpointContainerRequest{
		ContainerId: s.id, Location: filepath.Join(dir, archive), Timeout: scene.LimitSeconds,
	})
	return err
}

func (s *stage) checkpointPod(ctx context.Context) error {
	dir, err := s.out()
	if err != nil {
		return err
	}
	_, err = s.runtime().CheckpointPod(ctx, &cri.CheckpointPodRequest{PodSandboxId: s.pod, OutputPath: dir, ContainerIds: []string{s.id}})
	return err
}

// wantCheckpoint checks that the container runs on and that there is a whole archive or none, and
// retries.
func (s *stage) wantCheckpoint(ctx context.Context) error {
	return s.wantWhole(ctx, archive, (*stage).checkpoint)
}

// wantPodCheckpoint is the same for a directory, which is whole if it has a manifest.
func (s *stage) wantPodCheckpoint(ctx context.Context) error {
	return s.wantWhole(ctx, checkpoint.Manifest, (*stage).checkpointPod)
}

func (s *stage) wantWhole(ctx context.Context, whole string, try act) error {
	dir, err := s.out()
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if _, err := os.Stat(filepath.Join(dir, whole)); errors.Is(err, os.ErrNotExist) {
		if left, _ := os.ReadDir(dir); len(left) > 0 && s.w.PID() != 0 {
			return fmt.Errorf("the unfinished checkpoint has left %v", left)
		}
	} else if err := errors.Join(err, os.RemoveAll(dir)); err != nil {
		return err
	}
	if err := s.again(ctx, "checkpoint", try); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(dir, whole)); err != nil {
		return err
	}
	return s.do(ctx, (*stage).unlocked, (*stage).wantExec, (*stage).continues)
}

// continues checks that the container writes, as a frozen one does not.
func (s *stage) continues(ctx context.Context) error {
	if err := os.Truncate(s.logFile(), 0); err != nil {
		return err
	}
	return s.speaks(ctx)
}

// unlocked checks that criu has left nothing in the pod's firewall.
func (s *stage) unlocked(ctx context.Context) error {
	tables, err := s.w.podTables(ctx, s.pod)
	if err == nil && strings.Contains(tables, "CRIU") {
		err = fmt.Errorf("left in the network of the pod: %s", tables)
	}
	return err
}

// podTables lists the nftables tables in the network namespace of a pod.
func (w *world) podTables(ctx context.Context, pod string) (string, error) {
	netns := w.Path("ns", "netns", "crius-"+pod)
	if _, err := os.Stat(netns); errors.Is(err, os.ErrNotExist) {
		return "", nil // a new attempt has another pod
	}
	out, err := exec.CommandContext(ctx, "nsenter", "--net="+netns, "nft", "list", "tables").CombinedOutput()
	return string(out), err
}

// dumped leaves a checkpoint of a pod that is gone.
func (s *stage) dumped(ctx context.Context) error {
	return s.do(ctx, (*stage).running, (*stage).checkpointPod, (*stage).stopPod, (*stage).removePod)
}

func (s *stage) restorePod(ctx context.Context) error {
	dir, err := s.out()
	if err != nil {
		return err
	}
	resp, err := s.runtime().RestorePod(ctx, &cri.RestorePodRequest{
		CheckpointPath: dir, RuntimeHandler: s.handler, Config: s.config, ContainerConfigs: []*cri.ContainerConfig{s.container},
	})
	if err != nil {
		return err
	}
	s.pod, s.id = resp.PodSandboxId, resp.RestoredContainers[0].ContainerId
	return nil
}

// wantRestored checks that there is a whole pod or none, and restores another one.
func (s *stage) wantRestored(ctx context.Context) error {
	dir, err := s.out()
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	list, err := s.sandboxes(ctx)
	if err != nil {
		return err
	}
	if len(list) > 1 {
		return fmt.Errorf("want one pod at most, there are %v", list)
	}
	for _, p := range list {
		s.pod = p.Id
		if all, err := s.containers(ctx); err != nil || len(all) != 1 {
			return fmt.Errorf("a restored pod has the containers %v: %w", all, err)
		}
		if err := s.do(ctx, (*stage).stopPod, (*stage).removePod); err != nil {
			return err
		}
	}
	s.config.Metadata.Attempt++
	return s.do(ctx, (*stage).restorePod, (*stage).start, (*stage).wantExec, (*stage).continues)
}
