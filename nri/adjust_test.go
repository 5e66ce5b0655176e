package nri

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/containerd/nri/pkg/api"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/nriplugin"
)

func adjusted(t *testing.T, s *specs.Spec, a *api.ContainerAdjustment) *specs.Spec {
	t.Helper()
	if s.Process == nil {
		s.Process = &specs.Process{}
	}
	if err := (&Plugins{node: &fakeNode{}}).adjust(s, a); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestAdjustEnvironment(t *testing.T) {
	t.Parallel()
	s := &specs.Spec{Process: &specs.Process{Env: []string{"A=1", "B=2=3", "C=4"}}}
	got := adjusted(t, s, &api.ContainerAdjustment{Env: []*api.KeyValue{
		{Key: "A", Value: "new"}, {Key: api.MarkForRemoval("C")}, {Key: "D", Value: "x=y"}, {Key: api.MarkForRemoval("E")},
	}}).Process.Env
	if want := []string{"A=new", "B=2=3", "D=x=y"}; !slices.Equal(got, want) {
		t.Errorf("environment %q, want %q", got, want)
	}
}

func TestAdjustProcess(t *testing.T) {
	t.Parallel()
	s := &specs.Spec{Process: &specs.Process{Args: []string{"sleep"}, Rlimits: []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 1, Soft: 1}}}}
	p := adjusted(t, s, &api.ContainerAdjustment{
		Args:    []string{"true", "-x"},
		Rlimits: []*api.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 20, Soft: 10}, {Type: "RLIMIT_CORE"}},
		Linux:   &api.LinuxContainerAdjustment{OomScoreAdj: api.Int(7)},
	}).Process
	if !slices.Equal(p.Args, []string{"true", "-x"}) || p.OOMScoreAdj == nil || *p.OOMScoreAdj != 7 {
		t.Errorf("process %+v", p)
	}
	if want := []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 20, Soft: 10}, {Type: "RLIMIT_CORE"}}; !slices.Equal(p.Rlimits, want) {
		t.Errorf("rlimits %+v, want %+v", p.Rlimits, want)
	}
}

func TestAdjustMountsHidesNoOther(t *testing.T) {
	t.Parallel()
	s := &specs.Spec{Mounts: []specs.Mount{{Destination: "/proc"}, {Destination: "/data/in"}, {Destination: "/old"}}, Linux: &specs.Linux{}}
	s = adjusted(t, s, &api.ContainerAdjustment{Mounts: []*api.Mount{
		{Destination: "/data", Source: "/srv", Type: "bind", Options: []string{"rbind", "rslave"}}, {Destination: api.MarkForRemoval("/old")},
	}})
	var got []string
	for _, m := range s.Mounts {
		got = append(got, m.Destination)
	}
	if want := []string{"/proc", "/data", "/data/in"}; !slices.Equal(got, want) {
		t.Errorf("mounts %q, want %q", got, want)
	}
	if s.Linux.RootfsPropagation != "rslave" {
		t.Errorf("propagation of the root is %q, so the mount cannot be a slave", s.Linux.RootfsPropagation)
	}
}

func TestAdjustDevices(t *testing.T) {
	t.Parallel()
	s := &specs.Spec{Linux: &specs.Linux{Devices: []specs.LinuxDevice{{Path: "/dev/a"}, {Path: "/dev/b", Major: 1}}}}
	l := adjusted(t, s, &api.ContainerAdjustment{Linux: &api.LinuxContainerAdjustment{Devices: []*api.LinuxDevice{
		{Path: api.MarkForRemoval("/dev/a")}, {Path: "/dev/b", Type: "c", Major: 10, Minor: 229},
	}}}).Linux
	if len(l.Devices) != 1 || l.Devices[0].Path != "/dev/b" || l.Devices[0].Major != 10 {
		t.Errorf("devices %+v", l.Devices)
	}
	if rules := l.Resources.Devices; len(rules) != 1 || !rules[0].Allow || *rules[0].Major != 10 || *rules[0].Minor != 229 || rules[0].Access != "rw" {
		t.Errorf("rules %+v", rules)
	}
}

func TestAdjustLinux(t *testing.T) {
	t.Parallel()
	s := &specs.Spec{
		Annotations: map[string]string{"a": "1", "b": "2"},
		Linux: &specs.Linux{
			Sysctl:     map[string]string{"net.x": "1"},
			Namespaces: []specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: "/n"}, {Type: specs.IPCNamespace}},
			IntelRdt:   &specs.LinuxIntelRdt{ClosID: "old"},
		},
	}
	s = adjusted(t, s, &api.ContainerAdjustment{
		Annotations: map[string]string{api.MarkForRemoval("a"): "", "c": "3"},
		Hooks:       &api.Hooks{CreateRuntime: []*api.Hook{{Path: "/bin/hook", Args: []string{"hook", "x"}, Timeout: api.Int(3)}}},
		Linux: &api.LinuxContainerAdjustment{
			Sysctl:        map[string]string{"net.y": "2"},
			Namespaces:    []*api.LinuxNamespace{{Type: api.MarkForRemoval("ipc")}, {Type: "network", Path: "/m"}},
			SeccompPolicy: &api.LinuxSeccomp{DefaultAction: "SCMP_ACT_ALLOW", DefaultErrno: api.UInt32(uint32(38))},
			Rdt:           &api.LinuxRdt{Remove: true},
		},
	})
	if s.Annotations["a"] != "" || s.Annotations["b"] != "2" || s.Annotations["c"] != "3" {
		t.Errorf("annotations %q", s.Annotations)
	}
	if hooks := s.Hooks.CreateRuntime; len(hooks) != 1 || hooks[0].Path != "/bin/hook" || *hooks[0].Timeout != 3 {
		t.Errorf("hooks %+v", hooks)
	}
	if s.Linux.Sysctl["net.x"] != "1" || s.Linux.Sysctl["net.y"] != "2" {
		t.Errorf("sysctls %q", s.Linux.Sysctl)
	}
	if n := s.Linux.Namespaces; len(n) != 1 || n[0].Path != "/m" {
		t.Errorf("namespaces %+v", n)
	}
	if s.Linux.Seccomp.DefaultAction != specs.ActAllow || *s.Linux.Seccomp.DefaultErrnoRet != 38 {
		t.Errorf("seccomp %+v", s.Linux.Seccomp)
	}
	if s.Linux.IntelRdt != nil {
		t.Errorf("RDT is still %+v", s.Linux.IntelRdt)
	}
}

func TestAdjustResources(t *testing.T) {
	t.Parallel()
	limit, swap, shares := int64(100), int64(100), uint64(2)
	s := &specs.Spec{Linux: &specs.Linux{Resources: &specs.LinuxResources{
		Memory:         &specs.LinuxMemory{Limit: &limit, Swap: &swap},
		CPU:            &specs.LinuxCPU{Shares: &shares, Mems: "0"},
		HugepageLimits: []specs.LinuxHugepageLimit{{Pagesize: "2MB", Limit: 1}},
	}}}
	r := adjusted(t, s, &api.ContainerAdjustment{Linux: &api.LinuxContainerAdjustment{Resources: &api.LinuxResources{
		Memory:         &api.LinuxMemory{Limit: api.Int64(int64(200))},
		Cpu:            &api.LinuxCPU{Cpus: "0-1", Quota: api.Int64(int64(5))},
		HugepageLimits: []*api.HugepageLimit{{PageSize: "2MB", Limit: 3}},
		Unified:        map[string]string{"memory.high": "150"},
		Pids:           &api.LinuxPids{Limit: 9},
	}}}).Linux.Resources
	if *r.Memory.Limit != 200 || *r.Memory.Swap != 200 {
		t.Errorf("memory %d, with swap %d: want 200 for both, lower swap is refused by the kernel", *r.Memory.Limit, *r.Memory.Swap)
	}
	if *r.CPU.Shares != 2 || r.CPU.Cpus != "0-1" || r.CPU.Mems != "0" || *r.CPU.Quota != 5 {
		t.Errorf("CPU %+v", r.CPU)
	}
	if len(r.HugepageLimits) != 1 || r.HugepageLimits[0].Limit != 3 || r.Unified["memory.high"] != "150" || *r.Pids.Limit != 9 {
		t.Errorf("resources %+v", r)
	}
}

// Limits of memory and of its sum with swap: before, as set and after.
func TestMemoryAndSwapStayTogether(t *testing.T) {
	t.Parallel()
	type limits struct{ memory, sum int64 }
	for _, c := range []struct{ before, set, after limits }{
		{limits{64, 64}, limits{65, 64}, limits{65, 65}}, // the answer to an update that requested 64
		{limits{64, 64}, limits{32, 64}, limits{32, 32}},
		{limits{64, 64}, limits{32, 0}, limits{32, 32}},
		{limits{64, 128}, limits{96, 128}, limits{96, 128}},
		{limits{64, 64}, limits{32, 48}, limits{32, 48}},
		{limits{64, 0}, limits{96, 0}, limits{96, 0}}, // no swap accounting
	} {
		pointer := func(limit int64) *int64 {
			if limit == 0 {
				return nil
			}
			return &limit
		}
		to := &specs.LinuxMemory{Limit: pointer(c.before.memory), Swap: pointer(c.before.sum)}
		overlayMemory(&to, &specs.LinuxMemory{Limit: pointer(c.set.memory), Swap: pointer(c.set.sum)})
		got := limits{memory: *to.Limit}
		if to.Swap != nil {
			got.sum = *to.Swap
		}
		if got != c.after {
			t.Errorf("%+v, set %+v: %+v, want %+v", c.before, c.set, got, c.after)
		}
	}
}

func TestAdjustRefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	for name, a := range map[string]*api.ContainerAdjustment{
		"cgroups path": {Linux: &api.LinuxContainerAdjustment{CgroupsPath: "/elsewhere"}},
		"relabel":      {Mounts: []*api.Mount{{Destination: "/x", Options: []string{"relabel"}}}},
	} {
		err := (&Plugins{node: &fakeNode{}}).adjust(&specs.Spec{Process: &specs.Process{}}, a)
		if !errors.Is(err, fault.Unimplemented) {
			t.Errorf("%s: %v, want %v", name, err, fault.Unimplemented)
		}
	}
}

func TestClasses(t *testing.T) {
	t.Parallel()
	weight := uint16(900)
	adjusted := func(r *api.LinuxResources, rdt *api.LinuxRdt) (*specs.Linux, error) {
		s := &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{ // as set by annotations
			Resources: &specs.LinuxResources{BlockIO: &specs.LinuxBlockIO{Weight: &weight}},
			IntelRdt:  &specs.LinuxIntelRdt{ClosID: "silver"},
		}}
		err := (&Plugins{node: &fakeNode{}}).adjust(s, &api.ContainerAdjustment{Linux: &api.LinuxContainerAdjustment{Resources: r, Rdt: rdt}})
		return s.Linux, err
	}
	named := &api.LinuxResources{BlockioClass: api.String("slow"), RdtClass: api.String("gold")}
	if l, err := adjusted(named, nil); err != nil || *l.Resources.BlockIO.Weight != 20 || l.IntelRdt.ClosID != "gold" {
		t.Errorf("named: %+v, %+v, %v", l.Resources.BlockIO, l.IntelRdt, err)
	}
	removed := &api.LinuxResources{BlockioClass: api.String(""), RdtClass: api.String("")}
	if l, err := adjusted(removed, nil); err != nil || l.Resources.BlockIO != nil || l.IntelRdt != nil {
		t.Errorf("removed: %+v, %+v, %v", l.Resources.BlockIO, l.IntelRdt, err)
	}
	if l, err := adjusted(&api.LinuxResources{}, nil); err != nil || *l.Resources.BlockIO.Weight != weight || l.IntelRdt.ClosID != "silver" {
		t.Errorf("not named: %+v, %+v, %v", l.Resources.BlockIO, l.IntelRdt, err)
	}
	if l, err := adjusted(named, &api.LinuxRdt{EnableMonitoring: api.Bool(true)}); err != nil || l.IntelRdt.ClosID != "gold" || !l.IntelRdt.EnableMonitoring {
		t.Errorf("with an adjustment of RDT: %+v, %v", l.IntelRdt, err)
	}
	for _, unknown := range []*api.LinuxResources{{BlockioClass: api.String("gold")}, {RdtClass: api.String("slow")}} {
		if _, err := adjusted(unknown, nil); !errors.Is(err, fault.Invalid) {
			t.Errorf("%v: %v", unknown, err)
		}
		if _, err := updated(&Resources{}, unknown); !errors.Is(err, fault.Unimplemented) {
			t.Errorf("update to %v: %v", unknown, err)
		}
	}
}

// Any answer of a plugin is refused or makes a spec that can be written.
func TestAdjustNonsense(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		a := &api.ContainerAdjustment{}
		nriplugin.Nonsense(random, a)
		s := &specs.Spec{Process: &specs.Process{}}
		if (&Plugins{node: &fakeNode{}}).adjust(s, a) != nil {
			continue
		}
		if _, err := json.Marshal(s); err != nil {
			t.Errorf("%v\nadjusted by %v", err, a)
		}
	}
}
