package pod

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/label"
)

// infraRef returns how the runtime knows the infra container, the pod's own, which has the id
// of the pod.
func (s *Sandbox) infraRef() oci.Ref {
	ref := oci.Ref{
		ID:       s.ID,
		Dir:      filepath.Join(s.files.Dir, "infra"),
		ExitFile: filepath.Join(s.files.Dir, "infra-exit.json"),
	}
	if cfg := s.plan.Config.M; cfg != nil {
		ref.CgroupPath, ref.Cgroup, _ = s.engine.planner().Cgroup(cfg, s.plan.CgroupPrefix, s.ID)
	}
	return ref
}

// pausePath is the path of the program in the infra container.
const pausePath = "/pause"

// startInfra starts the infra container. Its program is the monitor's binary, mounted read-only
// over an empty root: no image is pulled, and none can be missing.
func (s *Sandbox) startInfra(ctx context.Context) error {
	defer cgroup.Warm()()
	ref := s.infraRef()
	err := trace.Call(ctx, "make infra directory", func() error {
		fileLabel, err := s.engine.labels.Files(&s.plan, nil)
		if err != nil {
			return err
		}
		return errors.Join(os.MkdirAll(ref.Rootfs(), 0o755), os.Chmod(ref.Rootfs(), 0o755), label.Set(ref.Rootfs(), fileLabel),
			s.files.Give(ref.Rootfs()), s.files.LetIn(ref.Dir))
	})
	if err != nil {
		return err
	}
	asked, err := s.asked()
	if err != nil {
		return err
	}
	in, err := s.specInput(ctx, asked)
	if err != nil {
		return err
	}
	in.Facts.Rootfs = ref.Rootfs()
	in.Facts.CgroupsPath = ref.CgroupPath
	ociSpec, err := spec.Sandbox(in, []string{pausePath, "pause"})
	if err != nil {
		return err
	}
	ociSpec.Mounts = append(ociSpec.Mounts, oci.ReadOnlyFile(s.engine.labels.Program, pausePath))
	if err := s.addHooks(ctx, nil, ociSpec); err != nil {
		return err
	}
	task, err := trace.Get(ctx, "runtime create", func(ctx context.Context) (oci.Task, error) {
		return s.runtime.Create(ctx, ref, ociSpec, oci.IO{})
	})
	if task != nil {
		s.Change(func(now *livePod) { now.infra, now.unreachable = task, false })
	}
	if err != nil {
		return err
	}
	if err := trace.Do(ctx, "runtime start", task.Start); err != nil {
		return err
	}
	s.engine.background.Go("watch infra container", func() { s.watchInfra(task) })
	return nil
}

// watchInfra ends the pod when its infra container dies: the PID namespace is gone with it, and
// all containers in it are dead or dying.
func (s *Sandbox) watchInfra(task oci.Task) {
	s.engine.background.Insist("watch infra container", func() {
		select {
		case <-s.engine.background.Closing().Done():
			return
		case <-s.ending.Done():
			return
		case <-task.Exited():
		}
		slog.Warn("infra container died, pod not ready", "pod", s.ID)
		s.end()
		s.Publish()
		s.Tell()
	})
}
