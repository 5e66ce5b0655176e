package blueprint

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/oci/tuning"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

var at = time.Unix(1, 0)

func planner() *Planner {
	return &Planner{
		Boot: "boot", NamespacesDir: "/run", CgroupDriver: spec.Cgroupfs,
		Defaults: spec.Defaults{Sysctls: map[string]string{"net.core.somaxconn": "1"}},
	}
}

func podConfig(options *cri.NamespaceOption) *cri.PodSandboxConfig {
	return &cri.PodSandboxConfig{
		Hostname: "host", LogDirectory: "/log",
		Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: options}},
	}
}

func TestPod(t *testing.T) {
	t.Parallel()
	mapping := []*cri.IDMapping{{ContainerId: 0, HostId: 100, Length: 10}}
	for name, c := range map[string]struct {
		options   *cri.NamespaceOption
		sandboxed bool
		want      ns.Spec
		infra     bool
	}{
		"own PIDs": {
			options: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
			want:    ns.Spec{Net: true, UTS: true, IPC: true, Hostname: "host", Sysctls: map[string]string{"net.core.somaxconn": "1"}},
		},
		"network of the node": {
			options: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER, Network: cri.NamespaceMode_NODE},
			want:    ns.Spec{IPC: true, Sysctls: map[string]string{}},
		},
		"IPC of the node": {
			options: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER, Ipc: cri.NamespaceMode_NODE},
			want:    ns.Spec{Net: true, UTS: true, Hostname: "host", Sysctls: map[string]string{"net.core.somaxconn": "1"}},
		},
		"shared PIDs": {
			options: &cri.NamespaceOption{Pid: cri.NamespaceMode_POD, Network: cri.NamespaceMode_NODE},
			want:    ns.Spec{IPC: true, Sysctls: map[string]string{}}, infra: true,
		},
		"sandbox": {
			options: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER, Network: cri.NamespaceMode_NODE}, sandboxed: true,
			want: ns.Spec{IPC: true, Sysctls: map[string]string{}}, infra: true,
		},
		"user namespace": {
			options: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER, Network: cri.NamespaceMode_NODE, UsernsOptions: &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: mapping, Gids: mapping}},
			want:    ns.Spec{IPC: true, Sysctls: map[string]string{}, UIDs: []ns.IDMap{{Host: 100, Size: 10}}, GIDs: []ns.IDMap{{Host: 100, Size: 10}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := podConfig(c.options)
			c.want.Dir, c.want.Name = "/run", "crius-id"
			got := planner().Pod("id", PodRequest{Handler: "runc", Config: cfg, Sandboxed: c.sandboxed, At: at})
			want := records.PodPlan{
				Handler: "runc", Config: records.Message[*cri.PodSandboxConfig]{M: cfg}, CreatedAt: at, BootID: "boot",
				Namespaces: c.want, Infra: c.infra, Sandboxed: c.sandboxed, OwnFiles: true,
			}
			if got.Namespaces.Sysctls == nil {
				got.Namespaces.Sysctls = map[string]string{}
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%+v\nwant %+v", got, want)
			}
		})
	}
}

func TestCgroup(t *testing.T) {
	t.Parallel()
	asked := &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{CgroupParent: "/asked"}}
	for _, c := range []struct {
		driver, parent string
		cfg            *cri.PodSandboxConfig
		prefix         string
		path, cgroupfs string
	}{
		{spec.Cgroupfs, "", nil, "", "/crius/crius-id", "/crius/crius-id"},
		{spec.Cgroupfs, "/set", nil, "crio", "/set/crio-id", "/set/crio-id"},
		{spec.Cgroupfs, "/set", asked, "", "/asked/crius-id", "/asked/crius-id"},
		{spec.Systemd, "", nil, "", "system.slice:crius:id", "/system.slice/crius-id.scope"},
	} {
		p := &Planner{CgroupDriver: c.driver, CgroupParent: c.parent}
		path, cgroupfs, err := p.Cgroup(c.cfg, c.prefix, "id")
		if err != nil || path != c.path || cgroupfs != c.cgroupfs {
			t.Errorf("%+v: %q, %q, %v", c, path, cgroupfs, err)
		}
	}
}

// node answers as Labels and Tuner.
type node struct {
	tuned  *tuning.Container // what was asked last
	limits *cri.LinuxContainerResources
}

func (*node) Files(*records.PodPlan, *cri.ContainerConfig) (string, error) { return "label", nil }

func (n *node) Plan(c tuning.Container) (*tuning.Plan, *cri.LinuxContainerResources, error) {
	n.tuned = &c
	return &tuning.Plan{}, n.limits, nil
}

func containerRequest(n *node) ContainerRequest {
	return ContainerRequest{
		ID: "id", PodID: "pod", At: at, Labels: n, Tuner: n,
		Pod:     &records.PodPlan{Handler: "runc", Config: records.Message[*cri.PodSandboxConfig]{M: podConfig(nil)}},
		Handler: oci.Handler{ExecCPUAffinity: oci.FirstCPU, MinMemory: 100},
		Config: &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: "c"}, LogPath: "c.log", Image: &cri.ImageSpec{Image: "example.com/image:tag"},
			Linux: &cri.LinuxContainerConfig{Resources: &cri.LinuxContainerResources{CpuShares: 2}},
		},
		Image: &storage.Image{ID: "image", RepoDigests: []string{"other@sha256:1", "example.com/image@sha256:1"}},
	}
}

func TestContainer(t *testing.T) {
	t.Parallel()
	n := &node{limits: &cri.LinuxContainerResources{CpuQuota: -1}}
	r := containerRequest(n)
	plan, err := planner().Container(r)
	if err != nil {
		t.Fatal(err)
	}
	if !n.tuned.PinExecs || n.tuned.Name != "c" || n.tuned.Limits.GetCpuShares() != 2 {
		t.Errorf("the tuner was asked for %+v", n.tuned)
	}
	if got := FirstLimits(&plan); got.GetCpuShares() != 2 || got.GetCpuQuota() != -1 {
		t.Errorf("limits at first: %v", got)
	}
	want := records.ContainerPlan{
		SandboxID: "pod", Handler: "runc", Config: records.Message[*cri.ContainerConfig]{M: r.Config},
		ImageID: "image", ImageRef: "example.com/image@sha256:1", CreatedAt: at, BootID: "boot", LogPath: "/log/c.log",
		CgroupsPath: "/crius/crius-id", Cgroup: "/crius/crius-id", MountLabel: "label", Tuning: &tuning.Plan{},
		Workload: records.Message[*cri.LinuxContainerResources]{M: n.limits}, StopSignal: cri.Signal_SIGNAL_SIGTERM, StopNumber: 15,
	}
	if !proto.Equal(plan.Workload.M, n.limits) {
		t.Errorf("the workload's limits are %v", plan.Workload.M)
	}
	plan.Workload = want.Workload
	if !reflect.DeepEqual(plan, want) {
		t.Errorf("%+v\nwant %+v", plan, want)
	}
}

// A sandbox has CPUs of its own kernel.
func TestContainerInSandboxIsNotTuned(t *testing.T) {
	t.Parallel()
	n := &node{}
	r := containerRequest(n)
	r.Pod.Sandboxed = true
	if plan, err := planner().Container(r); err != nil || plan.Tuning != nil || n.tuned != nil {
		t.Errorf("tuned %+v, %v", n.tuned, err)
	}
}

func TestContainerRefused(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*ContainerRequest){
		"log outside": func(r *ContainerRequest) { r.Config.LogPath = "../c.log" },
		"memory":      func(r *ContainerRequest) { r.Config.Linux.Resources.MemoryLimitInBytes = 99 },
		"signal":      func(r *ContainerRequest) { r.Config.StopSignal = cri.Signal(1000) },
		"cgroup":      func(r *ContainerRequest) { r.Pod.Config.M.Linux.CgroupParent = "/../x" },
	} {
		r := containerRequest(&node{})
		spoil(&r)
		if _, err := planner().Container(r); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Pods and device plugins are trusted with a size of writable layers apart from each other.
func TestSizeOfWritableLayer(t *testing.T) {
	t.Parallel()
	const key, own = annotation.LayerSizeKey, "writable-layer-size.crius.run"
	for name, c := range map[string]struct {
		pod, container map[string]string
		forPod, forOwn []string // allowed annotations
		want           int64
		err            error
	}{
		"none":                {nil, nil, []string{key}, []string{key}, 0, nil},
		"of the pod":          {map[string]string{key: "2Mi"}, nil, []string{own}, nil, 2 << 20, nil},
		"by name":             {map[string]string{key: "2Mi", own + "/c": "3Mi", own + "/d": "4Mi"}, nil, []string{own}, nil, 3 << 20, nil},
		"of the container":    {map[string]string{key: "2Mi", own + "/c": "3Mi"}, map[string]string{key: "5242880"}, []string{own}, []string{key}, 5 << 20, nil},
		"not of its own":      {map[string]string{key: "2Mi"}, map[string]string{key: "5Mi"}, []string{own}, nil, 2 << 20, nil},
		"not by a pattern":    {map[string]string{key: "2Mi"}, map[string]string{key: "5Mi"}, []string{"*"}, []string{"containerd.io/*/*"}, 0, nil},
		"bad, of the pod":     {map[string]string{key: "0"}, nil, []string{key}, nil, 0, fault.Invalid},
		"bad, its own":        {map[string]string{key: "2Mi"}, map[string]string{key: "1e9"}, []string{key}, []string{key}, 0, fault.Invalid},
		"bad and not its own": {nil, map[string]string{key: "1e9"}, []string{key}, nil, 0, nil},
	} {
		r := containerRequest(&node{})
		r.Pod.Config.M.Annotations, r.Config.Annotations = c.pod, c.container
		r.Handler.AllowedAnnotations, r.Handler.AllowedContainerAnnotations = c.forPod, c.forOwn
		if plan, err := planner().Container(r); plan.WritableSize != c.want || !errors.Is(err, c.err) {
			t.Errorf("%s: %d, %v, want %d, %v", name, plan.WritableSize, err, c.want, c.err)
		}
	}
}

func TestImageRef(t *testing.T) {
	t.Parallel()
	image := &storage.Image{ID: "id", RepoDigests: []string{"a@sha256:1", "b:5000/c@sha256:2"}}
	for _, c := range []struct {
		asked *cri.ImageSpec
		image *storage.Image
		want  string
	}{
		{&cri.ImageSpec{Image: "b:5000/c"}, image, "b:5000/c@sha256:2"},
		{&cri.ImageSpec{Image: "b:5000/c:tag"}, image, "b:5000/c@sha256:2"},
		{&cri.ImageSpec{Image: "b:5000/c@sha256:2"}, image, "b:5000/c@sha256:2"},
		{&cri.ImageSpec{Image: "id", UserSpecifiedImage: "b:5000/c:tag"}, image, "b:5000/c@sha256:2"},
		{&cri.ImageSpec{Image: "id"}, image, "a@sha256:1"},
		{&cri.ImageSpec{Image: "id"}, &storage.Image{ID: "id"}, "id"},
	} {
		if got := imageRef(c.asked, c.image); got != c.want {
			t.Errorf("%v: %q, want %q", c.asked, got, c.want)
		}
	}
}

func TestMergeLimits(t *testing.T) {
	t.Parallel()
	inForce := &cri.LinuxContainerResources{CpuShares: 7, CpuQuota: 2, HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 1}, {PageSize: "1GB", Limit: 1}}}
	r := &cri.LinuxContainerResources{CpuQuota: 3, HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 2}}}
	before := proto.CloneOf(inForce)
	want := &cri.LinuxContainerResources{CpuShares: 7, CpuQuota: 3, HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 2}, {PageSize: "1GB", Limit: 1}}}
	if got := MergeLimits(inForce, r); !proto.Equal(got, want) || !proto.Equal(inForce, before) {
		t.Errorf("%v, and %v in force; want %v", got, inForce, want)
	}
	if got := MergeLimits(nil, r); !proto.Equal(got, r) {
		t.Errorf("over nothing: %v", got)
	}
}

// The limit of memory and swap together follows that of memory if an update names only the
// latter, and CPU shares are those that the kernel has in force.
func TestMergeLimitsFollowsTheKernel(t *testing.T) {
	t.Parallel()
	type limits = cri.LinuxContainerResources
	for name, c := range map[string]struct{ inForce, update, want *limits }{
		"no swap, raised":         {&limits{MemoryLimitInBytes: 64, MemorySwapLimitInBytes: 64}, &limits{MemoryLimitInBytes: 128}, &limits{MemoryLimitInBytes: 128, MemorySwapLimitInBytes: 128}},
		"no swap, lowered":        {&limits{MemoryLimitInBytes: 64, MemorySwapLimitInBytes: 64}, &limits{MemoryLimitInBytes: 48}, &limits{MemoryLimitInBytes: 48, MemorySwapLimitInBytes: 48}},
		"some swap":               {&limits{MemoryLimitInBytes: 64, MemorySwapLimitInBytes: 100}, &limits{MemoryLimitInBytes: 128}, &limits{MemoryLimitInBytes: 128, MemorySwapLimitInBytes: 164}},
		"any swap":                {&limits{MemoryLimitInBytes: 64, MemorySwapLimitInBytes: -1}, &limits{MemoryLimitInBytes: 128}, &limits{MemoryLimitInBytes: 128, MemorySwapLimitInBytes: -1}},
		"limit lifted":            {&limits{MemoryLimitInBytes: 64, MemorySwapLimitInBytes: 64}, &limits{MemoryLimitInBytes: -1}, &limits{MemoryLimitInBytes: -1, MemorySwapLimitInBytes: -1}},
		"swap never named":        {&limits{MemoryLimitInBytes: 64}, &limits{MemoryLimitInBytes: 128}, &limits{MemoryLimitInBytes: 128}},
		"both named":              {&limits{MemoryLimitInBytes: 64, MemorySwapLimitInBytes: 64}, &limits{MemoryLimitInBytes: 128, MemorySwapLimitInBytes: 129}, &limits{MemoryLimitInBytes: 128, MemorySwapLimitInBytes: 129}},
		"swap alone":              {&limits{MemoryLimitInBytes: 64, MemorySwapLimitInBytes: 64}, &limits{MemorySwapLimitInBytes: 80}, &limits{MemoryLimitInBytes: 64, MemorySwapLimitInBytes: 80}},
		"shares below the least":  {nil, &limits{CpuShares: 1}, &limits{CpuShares: 2}},
		"shares above the most":   {nil, &limits{CpuShares: 1 << 40}, &limits{CpuShares: 1 << 18}},
		"shares that are not set": {&limits{CpuQuota: 5}, &limits{CpuQuota: 6}, &limits{CpuQuota: 6}},
	} {
		if got := MergeLimits(c.inForce, c.update); !proto.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestSandboxLimits(t *testing.T) {
	t.Parallel()
	cfg := &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{Resources: &cri.LinuxContainerResources{CpuQuota: 200_000, CpuPeriod: 100_000}}}
	for _, c := range []struct {
		quota, period int64
		want          int64
		clamped       bool
	}{
		{0, 0, 200_000, false},
		{400_000, 100_000, 200_000, false},
		{200_000, 100_000, 200_000, false},
		{50_000, 50_000, 100_000, true},
	} {
		update, clamped, err := planner().RuntimeSandboxLimits(cfg, false, func() (int64, int64, error) { return c.quota, c.period, nil })
		if err != nil || clamped != c.clamped || *update.Resources.CPU.Quota != c.want {
			t.Errorf("%+v: %+v, %v, %v", c, update.Resources.CPU, clamped, err)
		}
	}
	if _, _, err := planner().RuntimeSandboxLimits(&cri.PodSandboxConfig{}, false, func() (int64, int64, error) { return 0, 0, errors.New("asked") }); err != nil {
		t.Errorf("without a quota the parent's was asked for: %v", err)
	}
}

func TestSpec(t *testing.T) {
	t.Parallel()
	p := planner()
	p.InfraCPUs = "0"
	plan := p.Pod("id", PodRequest{Config: podConfig(nil)})
	facts := PodFacts{ID: "id", Plan: &plan, Files: files.Of("/run/pod", &plan), Abilities: &oci.Abilities{RecursiveReadOnly: true, CgroupNamespaces: true}, Hostname: "host",
		Asked: annotation.Asked{Allowed: []string{"a"}}}
	in := p.Spec(facts)
	if in.Facts.Files.Shm != "/run/pod/shm" || in.Facts.Namespaces.PID != "" || in.Asked.InfraCPUs != "0" || len(in.Facts.MountOptions) != 1 || !in.Facts.CgroupNamespaces || len(in.Defaults.AllowedAnnotations) != 1 {
		t.Errorf("%+v", in)
	}
	plan = p.Pod("id", PodRequest{Config: podConfig(&cri.NamespaceOption{Ipc: cri.NamespaceMode_NODE}), Sandboxed: true})
	facts.InfraPID, facts.Abilities = 7, &oci.Abilities{Sandboxed: true, VirtualMachine: true}
	in = p.Spec(facts)
	if in.Facts.Files.Shm != "/dev/shm" || in.Facts.Namespaces.PID != "/proc/7/ns/pid" || in.Asked.InfraCPUs != "" || !in.Facts.OwnKernel || !in.Facts.VirtualMachine {
		t.Errorf("in a sandbox: %+v", in)
	}
}
