package annotation

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

const (
	activation = "target.workload.openshift.io/management"
	prefix     = "resources.workload.openshift.io"
)

// management is a workload as OpenShift configures it, but with more defaults.
func management(cpu CPU) map[string]Workload {
	return map[string]Workload{
		"management": {Activation: activation, Prefix: prefix, Allowed: []string{"umask.crio.io"}, Resources: cpu},
		"other":      {Activation: "example.com/other", Resources: CPU{Set: "7"}},
		"unused":     {},
	}
}

// What the workload sets for a container, over a request of the kubelet.
func TestWorkload(t *testing.T) {
	t.Parallel()
	request := &cri.LinuxContainerResources{CpuShares: 512, CpuQuota: 20_000, CpuPeriod: 50_000, CpusetCpus: "4-7", MemoryLimitInBytes: 1 << 20}
	type set = cri.LinuxContainerResources
	for _, c := range []struct {
		what     string
		defaults CPU
		override string // of the container; empty: none
		want     *set
	}{
		{"nothing", CPU{}, "", nil},
		{"an empty override", CPU{}, "{}", nil},
		{"defaults", CPU{Shares: 20, Set: "0-1"}, "", &set{CpuShares: 20, CpusetCpus: "0-1"}},
		{"defaults and an override of one of them", CPU{Shares: 20, Set: "0-1"}, `{"cpushares": 45}`, &set{CpuShares: 45, CpusetCpus: "0-1"}},
		{"an override with texts", CPU{}, `{"cpushares": "45", "cpuset": "3"}`, &set{CpuShares: 45, CpusetCpus: "3"}},
		{"a zero, which overrides nothing", CPU{Shares: 20}, `{"cpushares": 0}`, &set{CpuShares: 20}},
		{"a quota, with the period of the request", CPU{Quota: 10_000}, "", &set{CpuQuota: 10_000, CpuPeriod: 50_000}},
		{"a quota with its period", CPU{}, `{"cpuquota": 30000, "cpuperiod": 200000}`, &set{CpuQuota: 30_000, CpuPeriod: 200_000}},
		{"no quota", CPU{Quota: 10_000}, `{"cpuquota": -1}`, &set{CpuQuota: -1, CpuPeriod: 50_000}},
		{"a period alone", CPU{Period: 10_000}, "", &set{CpuPeriod: 10_000}},
		{"a limit", CPU{}, `{"cpulimit": 500}`, &set{CpuQuota: 25_000, CpuPeriod: 50_000}},
		{"a limit with the workload's period", CPU{Period: 10_000}, `{"cpulimit": 500}`, &set{CpuQuota: 5_000, CpuPeriod: 10_000}},
		{"a limit over a quota", CPU{Quota: 7000, Limit: 100}, "", &set{CpuQuota: 5_000, CpuPeriod: 50_000}},
		{"a quota over a default limit", CPU{Limit: 100}, `{"cpuquota": 9000}`, &set{CpuQuota: 9_000, CpuPeriod: 50_000}},
		{"a tiny limit", CPU{}, `{"cpulimit": 1}`, &set{CpuQuota: 1000, CpuPeriod: 50_000}},
	} {
		annotations := map[string]string{activation: `{"effect": "PreferredDuringScheduling"}`, prefix + "/other": `{"cpushares": 9}`}
		if c.override != "" {
			annotations[prefix+"/app"] = c.override
		}
		a, err := Read(annotations, Rules{Workloads: management(c.defaults)})
		if err != nil {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		if got := a.Workload("app", request); !proto.Equal(got, c.want) || (got == nil) != (c.want == nil) {
			t.Errorf("%s: %v, want %v", c.what, got, c.want)
		}
	}

	a, err := Read(map[string]string{activation: ""}, Rules{Workloads: management(CPU{Limit: 500})})
	if got := a.Workload("app", nil); err != nil || got.GetCpuQuota() != 50_000 || got.GetCpuPeriod() != 100_000 {
		t.Errorf("a limit without a request: %v, %v", got, err)
	}
}

// Without the activation annotation a pod is in no workload, whatever else it
// says.
func TestWorkloadIsNotActivated(t *testing.T) {
	t.Parallel()
	a, err := Read(map[string]string{prefix + "/app": "nonsense", "": "x"}, Rules{Workloads: management(CPU{Shares: 20})})
	if err != nil || a.Workload("app", nil) != nil || a.InfraCPUs() != "" {
		t.Errorf("%+v, %v", a, err)
	}
	// A workload without a prefix cannot be overridden.
	a, err = Read(map[string]string{"example.com/other": "", "/app": `{"cpuset": "1"}`}, Rules{Workloads: management(CPU{})})
	if got := a.Workload("app", nil); err != nil || got.GetCpusetCpus() != "7" {
		t.Errorf("%v, %v", got, err)
	}
}

func TestWorkloadOfInfraContainer(t *testing.T) {
	t.Parallel()
	for override, want := range map[string]string{"": "0-1", `{"cpuset": "3", "cpushares": 9}`: "3"} {
		annotations := map[string]string{activation: ""}
		if override != "" {
			annotations[prefix+"/POD"] = override
		}
		a, err := Read(annotations, Rules{Workloads: management(CPU{Shares: 20, Set: "0-1"})})
		if err != nil || a.InfraCPUs() != want {
			t.Errorf("%s: %q, %v, want %q", override, a.InfraCPUs(), err, want)
		}
	}
}

func TestWorkloadNonsense(t *testing.T) {
	t.Parallel()
	for _, value := range []string{
		"", "null", "20", `"20"`, `{"cpushares": 1}`, `{"cpushares": 262145}`, `{"cpushares": -5}`, `{"cpushares": 2.5}`, `{"cpushares": "many"}`,
		`{"cpushares": {}}`, `{"cpuset": "all"}`, `{"cpuset": ["0"]}`, `{"cpuset": "0\n1"}`, `{"cpuquota": 5}`, `{"cpuperiod": 1}`, `{"cpulimit": -1}`,
		`{"cpulimit": 9223372036854775807}`, `{"memory": 5}`, `{"cpushares": 20`, `{"cpushares": 20} {}`,
	} {
		_, err := Read(map[string]string{activation: "", prefix + "/app": value}, Rules{Workloads: management(CPU{})})
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), prefix+"/app") {
			t.Errorf("%s: %v", value, err)
		}
	}
	_, err := Read(map[string]string{activation: "", "example.com/other": ""}, Rules{Workloads: management(CPU{})})
	if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "management and other") {
		t.Errorf("two workloads: %v", err)
	}
}

// A workload allows annotations in addition to those that the handler allows.
func TestWorkloadAllowsAnnotations(t *testing.T) {
	t.Parallel()
	annotations := map[string]string{"umask.crio.io": "0027", "shm-size.crio.io": "1Mi"}
	rules := Rules{Allowed: []string{"shm-size.crio.io"}, Workloads: management(CPU{})}
	a, err := Read(annotations, rules)
	if err != nil || a.Umask != nil || a.ShmSize != 1<<20 || !slices.Equal(a.Allowed, []string{"shm-size.crio.io"}) {
		t.Errorf("outside of the workload: %+v, %v", a, err)
	}
	annotations[activation] = ""
	a, err = Read(annotations, rules)
	if err != nil || a.Umask == nil || a.ShmSize != 1<<20 || !slices.Equal(a.Allowed, []string{"shm-size.crio.io", "umask.crio.io"}) {
		t.Errorf("in the workload: %+v, %v", a, err)
	}
}

func TestYield(t *testing.T) {
	t.Parallel()
	type limits = cri.LinuxContainerResources
	r := &limits{CpuShares: 2, CpuQuota: 3, CpuPeriod: 4, CpusetCpus: "5", CpusetMems: "0", MemoryLimitInBytes: 6}
	for _, c := range []struct{ set, want *limits }{
		{nil, r},
		{&limits{CpuShares: 9}, &limits{CpuQuota: 3, CpuPeriod: 4, CpusetCpus: "5", CpusetMems: "0", MemoryLimitInBytes: 6}},
		{&limits{CpuQuota: 9, CpuPeriod: 9}, &limits{CpuShares: 2, CpusetCpus: "5", CpusetMems: "0", MemoryLimitInBytes: 6}},
		{&limits{CpusetCpus: "9"}, &limits{CpuShares: 2, CpuQuota: 3, CpuPeriod: 4, CpusetMems: "0", MemoryLimitInBytes: 6}},
	} {
		if got := Yield(r, c.set); !proto.Equal(got, c.want) {
			t.Errorf("beside %v: %v, want %v", c.set, got, c.want)
		}
	}
	files := &limits{Unified: map[string]string{"cpu.weight": "1", "cpu.max": "2", "cpuset.cpus": "3", "memory.max": "4"}}
	for _, c := range []struct {
		set  *limits
		gone string
	}{{&limits{CpuShares: 9}, "cpu.weight"}, {&limits{CpuQuota: 9}, "cpu.max"}, {&limits{CpusetCpus: "9"}, "cpuset.cpus"}} {
		if got := Yield(files, c.set).Unified; len(got) != 3 || got[c.gone] != "" {
			t.Errorf("beside %v: %v", c.set, got)
		}
	}
	if r.CpuShares != 2 || Yield(nil, r) != nil {
		t.Error("the request has changed, or there is one that nobody made")
	}
}
