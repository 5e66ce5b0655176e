package tuning

import (
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	guaranteed = "/kubepods/pod1"
	slice      = "kubepods-pod1.slice"
)

// Which containers have CPUs of their own.
func TestOwnCPUs(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		parent string
		shares int64
		cpus   string
		want   string
	}{
		{guaranteed, 2048, "2-3", "2-3"},
		{slice, 1024, "5", "5"},
		{"", 2048, "0,4", "0,4"},
		{"kubepods-burstable-pod1.slice", 2048, "2-3", ""},
		{"/kubepods/burstable/pod1", 2048, "2-3", ""},
		{"kubepods-besteffort-pod1.slice", 2048, "2-3", ""},
		{guaranteed, 1536, "2-3", ""}, // not whole
		{guaranteed, 2048, "", ""},    // no static CPU policy
		{guaranteed, 2048, "0-7", ""}, // shared with others
		{guaranteed, 0, "", ""},       // no request
		{guaranteed, 1024, "all", ""}, // nonsense, which others refuse
		{guaranteed, -1024, "1", ""},  // likewise
		{guaranteed, 2048, "2,2", ""}, // one CPU
		{guaranteed, 3072, "1-3", "1-3"},
	} {
		got := own(Container{CgroupParent: c.parent, Limits: &cri.LinuxContainerResources{CpuShares: c.shares, CpusetCpus: c.cpus}})
		if got.String() != c.want {
			t.Errorf("%s, %d shares, CPUs %q: %q, want %q", c.parent, c.shares, c.cpus, got, c.want)
		}
	}
	if got := own(Container{}); got != nil {
		t.Errorf("no limits: %v", got)
	}
}

func TestExecsAreAnchored(t *testing.T) {
	t.Parallel()
	limits := &cri.LinuxContainerResources{CpuShares: 2048, CpusetCpus: "4-5"}
	for _, c := range []struct {
		container Container
		want      string // empty: all CPUs
	}{
		{Container{CgroupParent: guaranteed, Limits: limits, PinExecs: true}, "4"},
		{Container{CgroupParent: guaranteed, Limits: limits}, ""},
		{Container{CgroupParent: "kubepods-burstable-pod1.slice", Limits: limits, PinExecs: true}, ""},
	} {
		s := &specs.Spec{Process: &specs.Process{}}
		PlanFor(c.container).AddTo(s)
		affinity := s.Process.ExecCPUAffinity
		if (affinity == nil) != (c.want == "") || affinity != nil && (affinity.Initial != c.want || affinity.Final != c.want) {
			t.Errorf("%+v: %+v, want CPU %q", c.container, affinity, c.want)
		}
	}
}
