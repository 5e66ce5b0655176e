package limits

import (
	"context"
	"os"
	"os/exec"
	"path"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/cgroup"
)

// An absent quota is not written again, and a quota that is removed is.
func TestUpdateWithoutQuota(t *testing.T) {
	t.Parallel()
	with := func(quota int64) *specs.LinuxResources {
		shares := uint64(1024)
		return &specs.LinuxResources{CPU: &specs.LinuxCPU{Quota: &quota, Shares: &shares}}
	}
	for _, c := range []struct {
		old, now *specs.LinuxResources
		told     bool
	}{
		{with(-1), with(-1), false},
		{with(50_000), with(-1), true},
		{with(-1), with(50_000), true},
		{nil, with(-1), true},
	} {
		err := Container{Cgroup: "/nowhere"}.Update(t.Context(), Update{Resources: c.now, Old: c.old}, func(_ context.Context, r *specs.LinuxResources) error {
			if told := r.CPU.Quota != nil; told != c.told || *r.CPU.Shares != 1024 {
				t.Errorf("from %+v to %+v: the runtime is told %+v", c.old, c.now, r.CPU)
			}
			return nil
		})
		if err != nil || c.now.CPU.Quota == nil {
			t.Errorf("from %+v to %+v: %v", c.old, c.now, err)
		}
	}
}

// While the runtime updates a container its processes may end, and their pids
// may be reused.
func TestRestoreLeavesOtherProcessesAlone(t *testing.T) {
	t.Parallel()
	own, err := cgroup.Own()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	pid := cmd.Process.Pid
	old := oldLimits{scores: map[int]string{pid: "777\n"}}
	for _, c := range []struct {
		cgroup   string
		restored bool
	}{{path.Join(own, "another"), false}, {own, true}} {
		if err := old.restore(c.cgroup); err != nil {
			t.Error(err)
		}
		score, err := os.ReadFile(oomScoreFile(pid))
		if restored := strings.TrimSpace(string(score)) == "777"; err != nil || restored != c.restored {
			t.Errorf("in cgroup %s, of %s: score %s, %v", own, c.cgroup, score, err)
		}
	}
}
