package tuning

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

const (
	guaranteed = "/kubepods/pod1"
	slice      = "kubepods-pod1.slice"
)

// Which containers have exclusive CPUs.
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
		{guaranteed, 1024, "all", ""}, // invalid, refused elsewhere
		{guaranteed, -1024, "1", ""},  // likewise
		{guaranteed, 2048, "2,2", ""}, // one CPU
		{guaranteed, 3072, "1-3", "1-3"},
		{guaranteed, 262144, "0-255", "0-255"},
		{guaranteed, 262144, "0-299", "0-299"}, // the maximum that the kubelet requests
		{guaranteed, 262144, "0-254", ""},
		{guaranteed, 307200, "0-299", ""},
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

func TestPlan(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := m.server()
	s.shared = Set{0, 1}
	asked := &cri.LinuxContainerResources{CpuShares: 2048, CpusetCpus: "4,6", CpuQuota: 200_000, CpuPeriod: 50_000}
	type limits = cri.LinuxContainerResources
	for _, c := range []struct {
		what   string
		wishes Wishes
		want   *Plan
		limits *limits
	}{
		{"nothing", Wishes{}, nil, nil},
		{"no interrupts", Wishes{NoInterrupts: true}, &Plan{CPUs: Set{4, 6}, Quiet: Set{4, 6}}, nil},
		{"housekeeping", Wishes{NoInterrupts: true, Housekeeping: true}, &Plan{CPUs: Set{4, 6}, Quiet: Set{6}, Housekeeping: Set{4}}, nil},
		{"power", Wishes{Latency: "n/a", Governor: "performance"}, &Plan{CPUs: Set{4, 6}, Latency: "n/a", Governor: "performance"}, nil},
		{"no balancing", Wishes{NoBalancing: true}, &Plan{CPUs: Set{4, 6}, NoBalancing: true}, nil},
		{"no quota", Wishes{NoQuota: true}, &Plan{CPUs: Set{4, 6}, PodQuota: true}, &limits{CpuQuota: -1, CpuPeriod: 50_000}},
		{"shared", Wishes{Shared: []string{"app"}}, &Plan{CPUs: Set{4, 6}, Shared: Set{0, 1}, PodQuota: true}, &limits{CpuQuota: -1, CpuPeriod: 50_000, CpusetCpus: "0-1,4,6"}},
		{"shared for another", Wishes{Shared: []string{"other"}}, &Plan{CPUs: Set{4, 6}}, nil},
	} {
		plan, more, err := s.Plan(Container{Name: "app", CgroupParent: guaranteed, Limits: asked, Wishes: c.wishes})
		if err != nil || !reflect.DeepEqual(plan, c.want) || !proto.Equal(more, c.limits) {
			t.Errorf("%s: %+v, %v, %v; want %+v, %v", c.what, plan, more, err, c.want, c.limits)
		}
		plan, more, err = s.Plan(Container{Name: "app", CgroupParent: "kubepods-burstable-pod1.slice", Limits: asked, Wishes: c.wishes})
		if plan != nil || more != nil || err != nil {
			t.Errorf("%s, burstable: %+v, %v, %v", c.what, plan, more, err)
		}
	}
	if plan, _, err := s.Plan(Container{Limits: asked, Wishes: Wishes{NoQuota: true}}); err != nil || plan.PodQuota {
		t.Errorf("the quota of a cgroup that the pod does not name: %+v, %v", plan, err)
	}
	s.shared = nil
	if _, _, err := s.Plan(Container{Name: "app", Limits: asked, Wishes: Wishes{Shared: []string{"app"}}}); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "tuning.shared_cpuset") {
		t.Errorf("no shared CPUs: %v", err)
	}
}

func TestPlanInSpec(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		plan           *Plan
		env            []string
		initial, final string
	}{
		{nil, nil, "", ""},
		{&Plan{CPUs: Set{4, 5}}, nil, "", ""},
		{&Plan{CPUs: Set{4, 5}, PinExecs: true}, nil, "4", "4"},
		{&Plan{CPUs: Set{4, 5}, PinExecs: true, NoBalancing: true}, nil, "", "4"},
		{&Plan{CPUs: Set{4, 5}, Shared: Set{2, 3}, PinExecs: true}, []string{"OPENSHIFT_ISOLATED_CPUS=4-5", "OPENSHIFT_SHARED_CPUS=2-3"}, "2", "2"},
		{&Plan{CPUs: Set{4, 5}, Housekeeping: Set{4}}, []string{"OPENSHIFT_HOUSEKEEPING_CPUS=4"}, "", ""},
	} {
		s := &specs.Spec{Process: &specs.Process{}}
		c.plan.AddTo(s)
		var affinity specs.CPUAffinity
		if s.Process.ExecCPUAffinity != nil {
			affinity = *s.Process.ExecCPUAffinity
		}
		if !slices.Equal(s.Process.Env, c.env) || affinity != (specs.CPUAffinity{Initial: c.initial, Final: c.final}) {
			t.Errorf("%+v: %q, %+v", c.plan, s.Process.Env, affinity)
		}
	}
}
