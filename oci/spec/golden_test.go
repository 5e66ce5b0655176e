package spec

import (
	"maps"
	"slices"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// podID and containerID have the form of crius's ids.
const (
	podID       = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	containerID = "cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc"
)

// typical is a pod's container as a kubelet requests it, on an imaginary node.
// Tests change the part that they test.
func typical() Input {
	return Input{
		Request:  Request{Pod: typicalPod(), Container: typicalContainer(), Image: typicalImage()},
		Facts:    typicalFacts(),
		Defaults: typicalDefaults(),
	}
}

func typicalPod() *cri.PodSandboxConfig {
	return &cri.PodSandboxConfig{
		Metadata:    &cri.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "6f7c", Attempt: 1},
		Hostname:    "web",
		Annotations: map[string]string{"example.com/note": "x", "run.oci.handler": "wasm", "org.systemd.property.ExecStart": "evil"},
		Linux: &cri.LinuxPodSandboxConfig{
			CgroupParent: "/kubepods/burstable/pod6f7c",
			SecurityContext: &cri.LinuxSandboxSecurityContext{
				NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
				Seccomp:          &cri.SecurityProfile{},
			},
		},
	}
}

func typicalContainer() *cri.ContainerConfig {
	return &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: "server"},
		Image:    &cri.ImageSpec{Image: "registry.example.com/server:1"},
		Envs: []*cri.KeyValue{
			{Key: "KUBERNETES_PORT", Value: []byte("tcp://10.0.0.1:443")},
			{Key: "COLOR", Value: []byte("green")},
		},
		Linux: &cri.LinuxContainerConfig{
			Resources: &cri.LinuxContainerResources{
				CpuPeriod: 100000, CpuQuota: 50000, CpuShares: 256,
				MemoryLimitInBytes: 64 << 20, OomScoreAdj: 900,
			},
			SecurityContext: &cri.LinuxContainerSecurityContext{
				NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
				Seccomp:          &cri.SecurityProfile{},
				MaskedPaths:      kubeletMaskedPaths(),
				ReadonlyPaths:    []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
			},
		},
	}
}

func kubeletMaskedPaths() []string {
	return []string{
		"/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
	}
}

func typicalImage() *imagespec.ImageConfig {
	return &imagespec.ImageConfig{
		Env:        []string{"PATH=/bin", "COLOR=red", "VERSION=1.2"},
		Entrypoint: []string{"/probe"},
		Cmd:        []string{"report"},
		WorkingDir: "/srv",
	}
}

func typicalFacts() Facts {
	return Facts{
		PodID:       podID,
		Rootfs:      "/run/crius/containers/c/rootfs",
		Hostname:    "web",
		User:        Identity{Username: "root", Groupname: "root", Home: "/root", Groups: []uint32{0}},
		CgroupsPath: "/kubepods/burstable/pod6f7c/crius-c",
		Namespaces:  Namespaces{Net: "/run/netns/p", IPC: "/run/ipcns/p", UTS: "/run/utsns/p"},
		Files: Files{
			ResolvConf: "/run/crius/pods/p/resolv.conf",
			Hostname:   "/run/crius/pods/p/hostname",
			Shm:        "/run/crius/pods/p/shm",
		},
		Host: Host{
			Arch: "amd64", Kernel: "6.1.0-13-amd64", Bounding: allCapabilities, OOMScoreAdjMin: -1000,
			SwapAccounting: true, HugeTLB: true, HugePageSizes: []string{"2MB"}, PidsController: true, Seccomp: true,
		},
	}
}

func typicalDefaults() Defaults {
	caps, err := ParseCapabilities([]string{
		"CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE", "KILL",
	})
	if err != nil {
		panic(err)
	}
	return Defaults{Capabilities: caps}
}

// runcFeatures describes a runtime that supports everything specs may need.
func runcFeatures() *features.Features {
	return &features.Features{
		OCIVersionMin: "1.0.0",
		OCIVersionMax: "1.2.0",
		MountOptions:  []string{"ro", "rro", "rbind"},
		Linux: &features.Linux{
			Namespaces: []string{"cgroup", "ipc", "mount", "network", "pid", "user", "uts"},
		},
	}
}

// goldenSpec is one kind of request that clients really send.
type goldenSpec struct {
	name  string
	infra bool
	with  func(*Input)
}

// goldenSpecs are the requests whose complete specs are kept in
// testdata/golden.
func goldenSpecs() []goldenSpec {
	return []goldenSpec{
		{name: "kubelet-root", with: func(*Input) {}},
		{name: "kubelet-user", with: kubeletUser},
		{name: "kubelet-1.17", with: oldKubelet},
		{name: "restricted", with: restricted},
		{name: "bare", with: bare},
		{name: "privileged", with: privilegedPod},
		{name: "host-namespaces", with: hostNamespaces},
		{name: "debug-target", with: debugTarget},
		{name: "shared-pid", with: func(in *Input) {
			sharePID(in)
			in.Request.Container.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
			in.Facts.Namespaces.PID = "/proc/42/ns/pid"
		}},
		{name: "infra", infra: true, with: sharePID},
		{name: "infra-vm", infra: true, with: virtualMachine},
		{name: "user-namespace", with: userNamespacePod},
		{name: "volumes", with: volumes},
		{name: "ambient", with: ambientCapabilities},
		{name: "cgroup-v2", with: cgroupV2},
		{name: "node-defaults", with: nodeDefaults},
		{name: "terminal", with: func(in *Input) {
			in.Request.Container.Tty, in.Request.Container.Stdin = true, true
			in.Request.Container.Args = []string{"-c", "top"}
		}},
		{name: "unmasked", with: func(in *Input) {
			in.Request.Container.Linux.SecurityContext.MaskedPaths = nil
			in.Request.Container.Linux.SecurityContext.ReadonlyPaths = nil
		}},
	}
}

func (a goldenSpec) input() Input {
	in := typical()
	a.with(&in)
	return in
}

func (a goldenSpec) spec(in Input) (*specs.Spec, error) {
	if a.infra {
		return Sandbox(in, []string{"/pause"})
	}
	return Container(in)
}

// kubeletUser is a container of a pod with runAsUser, fsGroup and volumes.
func kubeletUser(in *Input) {
	in.Request.Container.Command = []string{"/probe", "report"}
	in.Request.Container.WorkingDir = "/tmp"
	sc := in.Request.Container.Linux.SecurityContext
	sc.RunAsUser = &cri.Int64Value{Value: 1000}
	sc.RunAsGroup = &cri.Int64Value{Value: 3000}
	sc.SupplementalGroups = []int64{2000}
	sc.Capabilities = &cri.Capability{AddCapabilities: []string{"NET_RAW"}, DropCapabilities: []string{"cap_kill"}}
	in.Facts.User = Identity{UID: 1000, GID: 3000, Groups: []uint32{2000, 3000}, Home: "/home/app"}
	in.Request.Container.Mounts = []*cri.Mount{
		{ContainerPath: "/etc/hosts", HostPath: "/var/lib/kubelet/pods/6f7c/etc-hosts"},
		{ContainerPath: "/dev/termination-log", HostPath: "/var/lib/kubelet/pods/6f7c/containers/server/1"},
		{ContainerPath: "/var/run/secrets/kubernetes.io/serviceaccount/", HostPath: "/var/lib/kubelet/pods/6f7c/volumes/token", Readonly: true},
		{ContainerPath: "/data", HostPath: "/var/lib/kubelet/pods/6f7c/volumes/data"},
	}
}

// oldKubelet sends profiles as strings only, as kubelets up to 1.18 do.
func oldKubelet(in *Input) {
	sc := in.Request.Container.Linux.SecurityContext
	sc.Seccomp = nil
	sc.SeccompProfilePath = "docker/default"
	sc.ApparmorProfile = "runtime/default"
	in.Request.Pod.Linux.SecurityContext.Seccomp = nil
	in.Request.Pod.Linux.SecurityContext.SeccompProfilePath = "runtime/default"
}

// restricted follows the restricted Pod Security Standard.
func restricted(in *Input) {
	sc := in.Request.Container.Linux.SecurityContext
	sc.RunAsUser = &cri.Int64Value{Value: 1000}
	sc.Capabilities = &cri.Capability{DropCapabilities: []string{"ALL"}}
	sc.NoNewPrivs = true
	sc.ReadonlyRootfs = true
	in.Facts.User = Identity{UID: 1000, Groups: []uint32{0}}
}

// bare is what crictl sends for the shortest possible request.
func bare(in *Input) {
	in.Request.Pod.Linux = nil
	in.Request.Container.Linux = nil
	in.Facts.Namespaces.PID = "/proc/42/ns/pid"
}

func privilegedPod(in *Input) {
	in.Request.Pod.Linux.SecurityContext.Privileged = true
	in.Request.Container.Linux.SecurityContext.Privileged = true
	mode := fileMode(0o660)
	in.Facts.HostDevices = []Device{
		{LinuxDevice: specs.LinuxDevice{Path: "/dev/fuse", Type: "c", Major: 10, Minor: 229, FileMode: mode}, Access: "rwm"},
		{LinuxDevice: specs.LinuxDevice{Path: "/dev/null", Type: "c", Major: 1, Minor: 3}, Access: "rwm"},
	}
}

func hostNamespaces(in *Input) {
	node := &cri.NamespaceOption{Network: cri.NamespaceMode_NODE, Pid: cri.NamespaceMode_NODE, Ipc: cri.NamespaceMode_NODE}
	in.Request.Pod.Linux.SecurityContext.NamespaceOptions = node
	in.Request.Container.Linux.SecurityContext.NamespaceOptions = node
	in.Facts.Namespaces = Namespaces{}
	in.Facts.Hostname = "node-1"
	in.Facts.Files.Shm = "/dev/shm"
}

// debugTarget is kubectl debug with --target.
func debugTarget(in *Input) {
	sc := in.Request.Container.Linux.SecurityContext
	sc.NamespaceOptions = &cri.NamespaceOption{Pid: cri.NamespaceMode_TARGET, TargetId: containerID}
	sc.Capabilities = &cri.Capability{AddCapabilities: []string{"SYS_PTRACE"}}
	in.Facts.Namespaces.PID = "/proc/4711/ns/pid"
}

func sharePID(in *Input) {
	in.Request.Pod.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
}

func virtualMachine(in *Input) {
	sharePID(in)
	in.Facts.OwnKernel, in.Facts.VirtualMachine = true, true
	in.Facts.Namespaces = Namespaces{Net: "/run/netns/p"}
	in.Defaults.Sysctls = map[string]string{"net.ipv4.ping_group_range": "0 2147483647"}
	in.Defaults.AllowedAnnotations = []string{"io.katacontainers.config.hypervisor.default_vcpus"}
	in.Request.Pod.Annotations["io.katacontainers.config.hypervisor.default_vcpus"] = "2"
	in.Request.Pod.Linux.Sysctls = map[string]string{"kernel.shm_rmid_forced": "1"}
	in.Request.Pod.Linux.Resources = &cri.LinuxContainerResources{CpuPeriod: 100000, CpuQuota: 200000, MemoryLimitInBytes: 1 << 30}
}

func userNamespacePod(in *Input) {
	ids := []*cri.IDMapping{{HostId: 100000, ContainerId: 0, Length: 65536}}
	in.Request.Pod.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &cri.UserNamespace{Uids: ids, Gids: ids}
	in.Request.Container.Mounts = []*cri.Mount{
		{ContainerPath: "/data", HostPath: "/volumes/data", UidMappings: ids, GidMappings: ids},
	}
	in.Facts.Namespaces.User = "/run/userns/p"
	in.Facts.Features, in.Facts.IDMap = runcFeatures(), true
}

func volumes(in *Input) {
	in.Facts.Features = runcFeatures()
	in.Request.Container.Mounts = []*cri.Mount{
		{ContainerPath: "/data/deep/below", HostPath: "/volumes/below"},
		{ContainerPath: "/data", HostPath: "/volumes/link"},
		{ContainerPath: "/shared", HostPath: "/volumes/shared", Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL},
		{ContainerPath: "/slave", HostPath: "/volumes/slave", Propagation: cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER},
		{ContainerPath: "/frozen", HostPath: "/volumes/frozen", Readonly: true, RecursiveReadOnly: true},
		{ContainerPath: "/tools", Image: &cri.ImageSpec{Image: "tools:1"}, Readonly: true},
		{ContainerPath: "/scratch", HostPath: "/volumes/scratch", MountOptions: []string{"noexec", "nosuid"}},
		{ContainerPath: "/dev/shm", HostPath: "/volumes/shm"},
	}
	in.Facts.MountSources = []string{"", "/volumes/real", "", "", "", "/run/images/tools"}
}

func ambientCapabilities(in *Input) {
	sc := in.Request.Container.Linux.SecurityContext
	sc.RunAsUser = &cri.Int64Value{Value: 1000}
	sc.Capabilities = &cri.Capability{AddAmbientCapabilities: []string{"NET_BIND_SERVICE"}, DropCapabilities: []string{"ALL"}}
	in.Facts.User = Identity{UID: 1000, Groups: []uint32{0}}
}

func cgroupV2(in *Input) {
	in.Facts.Host.CgroupV2 = true
	in.Facts.CgroupsPath = "kubepods-burstable-pod6f7c.slice:crius:c"
	in.Defaults.PidsLimit = 1024
	r := in.Request.Container.Linux.Resources
	r.MemorySwapLimitInBytes = 96 << 20
	r.CpusetCpus, r.CpusetMems = "0-1,3", "0"
	r.HugepageLimits = []*cri.HugepageLimit{{PageSize: "2MB", Limit: 4 << 20}}
	r.Unified = map[string]string{"memory.high": "61440000", "memory.oom.group": "1"}
}

func nodeDefaults(in *Input) {
	in.Defaults.ReadOnly = true
	in.Defaults.PidsLimit = 100
	in.Defaults.Env = []string{"HTTP_PROXY=http://proxy", "COLOR=blue"}
	in.Defaults.Ulimits = []specs.POSIXRlimit{{Type: "RLIMIT_MEMLOCK", Soft: 65536, Hard: 131072}}
	in.Defaults.Devices = []Device{{LinuxDevice: specs.LinuxDevice{Path: "/dev/fuse", Type: "c", Major: 10, Minor: 229}, Access: "rw"}}
	in.Defaults.AllowedAnnotations = []string{"example.com/note", "io.kubernetes.cri.sandbox-id"}
	in.Request.Pod.Annotations["io.kubernetes.cri.sandbox-id"] = "spoofed"
}

// mutate changes a fresh typical input and returns its spec.
func mutate(t *testing.T, with func(*Input)) *specs.Spec {
	t.Helper()
	in := typical()
	with(&in)
	s, err := Container(in)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mountAt(t *testing.T, s *specs.Spec, destination string) specs.Mount {
	t.Helper()
	i := slices.IndexFunc(s.Mounts, func(m specs.Mount) bool { return m.Destination == destination })
	if i < 0 {
		t.Fatalf("no mount at %s", destination)
	}
	return s.Mounts[i]
}

func namespacePaths(s *specs.Spec) map[specs.LinuxNamespaceType]string {
	out := map[specs.LinuxNamespaceType]string{}
	for _, n := range s.Linux.Namespaces {
		out[n.Type] = n.Path
	}
	return out
}

func kinds(s *specs.Spec) []specs.LinuxNamespaceType {
	return slices.Sorted(maps.Keys(namespacePaths(s)))
}
