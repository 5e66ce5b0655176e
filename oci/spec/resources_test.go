package spec

import (
	"errors"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func TestResources(t *testing.T) {
	type limits = cri.LinuxContainerResources
	full := Host{SwapAccounting: true, HugeTLB: true, HugePageSizes: []string{"1GB", "2MB"}, PidsController: true}
	for _, c := range []struct {
		name string
		r    *limits
		host Host
		want string
	}{
		{"nil", nil, full, `{}`},
		{"zero", &limits{}, full, `{}`},
		{"cpu", &limits{CpuShares: 2, CpuPeriod: 1000, CpuQuota: -1, CpusetCpus: "0-3,7", CpusetMems: "0"}, full,
			`{"cpu":{"shares":2,"quota":-1,"period":1000,"cpus":"0-3,7","mems":"0"}}`},
		{"shares alone", &limits{CpuShares: 1024}, full, `{"cpu":{"shares":1024}}`},
		{"memory without swap", &limits{MemoryLimitInBytes: 100}, full, `{"memory":{"limit":100,"swap":100}}`},
		{"memory on a node that cannot limit swap", &limits{MemoryLimitInBytes: 100, MemorySwapLimitInBytes: 200}, Host{}, `{"memory":{"limit":100}}`},
		{"swap", &limits{MemoryLimitInBytes: 100, MemorySwapLimitInBytes: 200}, full, `{"memory":{"limit":100,"swap":200}}`},
		{"all the swap", &limits{MemoryLimitInBytes: 100, MemorySwapLimitInBytes: -1}, full, `{"memory":{"limit":100,"swap":-1}}`},
		{"no limit any more", &limits{MemoryLimitInBytes: -1}, full, `{"memory":{"limit":-1,"swap":-1}}`},
		{"no limit of swap alone", &limits{MemorySwapLimitInBytes: -1}, full, `{"memory":{"swap":-1}}`},
		{"huge pages", &limits{HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 0}, {PageSize: "1GB", Limit: 1 << 30}}}, full,
			`{"hugepageLimits":[{"pageSize":"2MB","limit":0},{"pageSize":"1GB","limit":1073741824}]}`},
		{"huge pages without a controller", &limits{HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 2 << 20}}}, Host{HugePageSizes: []string{"2MB"}}, `{}`},
		{"no huge pages of a size that the node lacks", &limits{HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 2 << 20}, {PageSize: "1GB"}}},
			Host{HugeTLB: true, HugePageSizes: []string{"2MB"}}, `{"hugepageLimits":[{"pageSize":"2MB","limit":2097152}]}`},
		{"no huge pages", &limits{HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB"}}}, Host{HugeTLB: true}, `{}`},
		{"unified", &limits{Unified: map[string]string{"memory.high": "5", "io.weight": "default 100", "hugetlb.2MB.max": "0"}}, Host{CgroupV2: true},
			`{"unified":{"hugetlb.2MB.max":"0","io.weight":"default 100","memory.high":"5"}}`},
	} {
		got, err := Resources(c.r, c.host)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if text := compact(t, got); text != c.want {
			t.Errorf("%s: %s", c.name, text)
		}
	}
}

func TestResourcesRefused(t *testing.T) {
	type limits = cri.LinuxContainerResources
	v2 := Host{CgroupV2: true}
	for name, c := range map[string]struct {
		r    *limits
		host Host
	}{
		"shares":                {&limits{CpuShares: -1}, v2},
		"period":                {&limits{CpuPeriod: -1}, v2},
		"cpus":                  {&limits{CpusetCpus: "0,"}, v2},
		"mems":                  {&limits{CpusetMems: "0\n1"}, v2},
		"memory":                {&limits{MemoryLimitInBytes: -2}, v2},
		"swap":                  {&limits{MemorySwapLimitInBytes: -2}, v2},
		"swap alone":            {&limits{MemorySwapLimitInBytes: 300}, v2},
		"swap, all the memory":  {&limits{MemoryLimitInBytes: -1, MemorySwapLimitInBytes: 300}, Host{}},
		"swap below memory":     {&limits{MemoryLimitInBytes: 100, MemorySwapLimitInBytes: 99}, v2},
		"page size":             {&limits{HugepageLimits: []*cri.HugepageLimit{{PageSize: "2M"}}}, v2},
		"page size as path":     {&limits{HugepageLimits: []*cri.HugepageLimit{{PageSize: "../2MB"}}}, v2},
		"unified on v1":         {&limits{Unified: map[string]string{"memory.high": "1"}}, Host{}},
		"unified process":       {&limits{Unified: map[string]string{"cgroup.procs": "1"}}, v2},
		"unified kill":          {&limits{Unified: map[string]string{"cgroup.kill": "1"}}, v2},
		"unified path":          {&limits{Unified: map[string]string{"../memory.max": "1"}}, v2},
		"unified without dot":   {&limits{Unified: map[string]string{"memory": "1"}}, v2},
		"unified, second write": {&limits{Unified: map[string]string{"memory.max": "1\n2"}}, v2},
	} {
		if got, err := Resources(c.r, c.host); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %s, %v", name, compact(t, got), err)
		}
	}
}

func TestHugePagesOfASizeThatTheNodeLacks(t *testing.T) {
	for want, sizes := range map[string][]string{
		"hugepage_limits: this node has no huge pages of 1GB; it has: 2MB, 64KB": {"2MB", "64KB"},
		"hugepage_limits: this node has no huge pages of 1GB; it has: none":      nil,
	} {
		_, err := Resources(&cri.LinuxContainerResources{HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB"}, {PageSize: "1GB", Limit: 1 << 30}}},
			Host{HugeTLB: true, HugePageSizes: sizes})
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// A kubelet with the static CPU manager sends -1 for containers with exclusive
// CPUs.
func TestNoQuotaIsLeftOutOfNewContainers(t *testing.T) {
	for quota, want := range map[int64]bool{-1: false, 50_000: true} {
		s := mutate(t, func(in *Input) { in.Request.Container.Linux.Resources.CpuQuota = quota })
		if got := s.Linux.Resources.CPU.Quota; (got != nil) != want {
			t.Errorf("quota %d: %v", quota, got)
		}
	}
}

func TestPidsLimit(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Input)
		want   int64 // 0: left out
	}{
		{"none", func(*Input) {}, 0},
		{"default", func(in *Input) { in.Defaults.PidsLimit = 100 }, 100},
		{"unlimited", func(in *Input) { in.Defaults.PidsLimit = -1 }, 0},
		{"no controller", func(in *Input) { in.Defaults.PidsLimit, in.Facts.Host.PidsController = 100, false }, 0},
		{"the request's own", func(in *Input) {
			in.Defaults.PidsLimit, in.Facts.Host.CgroupV2 = 100, true
			in.Request.Container.Linux.Resources.Unified = map[string]string{"pids.max": "7"}
		}, 0},
	} {
		s := mutate(t, c.change)
		got := int64(0)
		if s.Linux.Resources.Pids != nil {
			got = *s.Linux.Resources.Pids.Limit
		}
		if got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

func TestReport(t *testing.T) {
	t.Parallel()
	number := func(n int64) *int64 { return &n }
	base := &cri.LinuxContainerResources{CpuShares: 2, MemoryLimitInBytes: 64, HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 1}}}
	shares := uint64(512)
	got := Report(base, &specs.LinuxResources{
		CPU:            &specs.LinuxCPU{Shares: &shares, Cpus: "0"},
		Memory:         &specs.LinuxMemory{Limit: number(96), Swap: number(96)},
		HugepageLimits: []specs.LinuxHugepageLimit{{Pagesize: "2MB", Limit: 3}},
		Unified:        map[string]string{"memory.high": "50"},
	})
	want := &cri.LinuxContainerResources{
		CpuShares: 512, CpusetCpus: "0", MemoryLimitInBytes: 96,
		HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 3}}, Unified: map[string]string{"memory.high": "50"},
	}
	if !proto.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if base.CpuShares != 2 || base.HugepageLimits[0].Limit != 1 {
		t.Errorf("the base has changed: %v", base)
	}
	if got := Report(base, nil); got != base {
		t.Errorf("nothing set, and %v", got)
	}
	base.MemorySwapLimitInBytes = 64 // named by a request
	if got := Report(base, &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: number(96), Swap: number(96)}}); got.MemorySwapLimitInBytes != 96 {
		t.Errorf("limit of swap %d, want 96", got.MemorySwapLimitInBytes)
	}
}
