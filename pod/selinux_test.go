package pod

import (
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/selinux"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/label"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// labelling returns an engine on a node whose policy has types for containers, and a level for
// one pod.
func labelling(b *bench) *Engine {
	e := b.engine()
	e.planner().Defaults.SELinux = &spec.SELinux{Contexts: selinux.Contexts{
		Process: "system_u:system_r:container_t:s0", File: "system_u:object_r:container_file_t:s0", Categories: 2,
	}}
	e.labels = label.New(e.planner().Defaults.SELinux, b.cfg.PauseProgram, b.cfg.StateDir)
	return e
}

// The files of a container have its pod's level, or the one that it asks for.
func TestContainerFilesHaveTheLevelOfThePod(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := labelling(b)
	config := podConfig("a")
	level, err := e.labels.Allot("id", config)
	if err != nil || level != "s0:c0,c1" {
		t.Fatal(level, err)
	}
	s, err := e.newSandbox("id", records.Pod{PodPlan: records.PodPlan{Handler: "fake", Config: records.Message[*cri.PodSandboxConfig]{M: config}, SELinuxLevel: level}})
	if err != nil {
		t.Fatal(err)
	}
	for asked, want := range map[string]string{"": "s0:c0,c1", "s0:c7": "s0:c7"} {
		cfg := containerConfig("c")
		cfg.Linux = &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{SelinuxOptions: &cri.SELinuxOption{Level: asked}}}
		plan, err := e.planner().Container(blueprint.ContainerRequest{
			ID: "ctr", PodID: s.ID, Pod: &s.plan, Handler: s.runtime.Handler(), Config: cfg, Image: &storage.Image{ID: "image"},
			Labels: e.labels, Tuner: e.tuner,
		})
		if err != nil || plan.MountLabel != "system_u:object_r:container_file_t:"+want {
			t.Errorf("asked for %q: %q, %v", asked, plan.MountLabel, err)
		}
		if in, err := s.specInput(t.Context(), annotation.Asked{}); err != nil || in.Facts.SELinuxLevel != level {
			t.Errorf("the spec's level is %q, %v", in.Facts.SELinuxLevel, err)
		}
	}
}

// A level is freed with its pod, and a pod on record has its level after a restart.
func TestLevelIsGivenBackWithThePod(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a") // made without a label, which this node may not be able to mount
	b.close(e)

	e = b.engine()
	e.labels.Levels = selinux.NewLevels(2)
	r := &recovery{engine: e}
	r.loadSandboxes(t.Context(), map[string]*records.Pod{"other": {PodPlan: records.PodPlan{Handler: "gone", SELinuxLevel: "s0:c0,c1"}}})
	if level, err := e.labels.Levels.Allot("new"); err == nil {
		t.Errorf("level %s of a pod on record is allotted again", level)
	}
	e.labels.Levels.Free("other")

	if _, err := e.labels.Levels.Allot(pod); err != nil {
		t.Fatal(err)
	}
	b.remove(e, pod)
	if _, err := e.labels.Levels.Allot("new"); err != nil {
		t.Errorf("after the removal of the pod: %v", err)
	}
	b.nothingLeft()
}
