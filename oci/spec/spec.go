// Package spec turns a CRI request and resolved facts into an OCI runtime spec.
//
// It has two halves, and every file belongs to only one of them.
//
// The pure half is Container and Sandbox: folds over small rules, one concern
// each. A rule reads the Input, writes its own part of the spec and may refuse
// the request; it does no I/O, changes nothing reachable from the Input and
// shares no slice or map with it (CVE-2021-21334), so that equal inputs give
// equal specs and containers of one image cannot see each other's data. Parsers
// and validators that other packages need as well (StopSignal, ValidatePod,
// Resources, CgroupsPath, …) live here too.
//
// The resolving half, in the files named resolve_*.go, reads what the rules
// need from the node and from the mounted image: Host, users and groups, device
// nodes, seccomp profiles. What it reads below a container's root file system
// is hostile: such reads are confined to that tree, limited in size and refuse
// anything but regular files.
//
// Errors caused by the request wrap fault.Invalid, those for what the handler
// or the node cannot do wrap fault.Unimplemented, and those for a pod that
// lacks something on which the container relies wrap fault.Precondition.
package spec

import (
	"fmt"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// rule writes one concern into the spec or refuses the request.
type rule func(in *Input, s *specs.Spec) error

// Container returns the spec of the container in in.Request.
func Container(in Input) (*specs.Spec, error) {
	if in.Request.Pod == nil || in.Request.Container == nil {
		return nil, invalid("the request has no pod or no container configuration")
	}
	return fold(&in, annotations(in.Request.Container.GetMetadata().GetName()))
}

// Sandbox returns the spec of a pod's infra container: the first process of a
// shared PID namespace, or the root container that a virtual machine handler
// needs. It runs args from a read-only root file system, without capabilities
// and under the runtime's default profiles, whatever the pod requests for its
// containers. It ignores in.Request.Container and in.Request.Image.
func Sandbox(in Input, args []string) (*specs.Spec, error) {
	if in.Request.Pod == nil {
		return nil, invalid("the request has no pod configuration")
	}
	if err := ValidatePod(in.Request.Pod); err != nil {
		return nil, err
	}
	in.Request.Container = infra(in.Request.Pod, args)
	if in.Facts.OwnKernel {
		in.Request.Container.Linux.Resources = ownKernelResources(in.Request.Pod, in.Facts.VirtualMachine)
	}
	in.Request.Container.Linux.Resources.CpusetCpus = in.Asked.InfraCPUs
	in.Request.Image, in.Asked = nil, Asked{}
	in.Facts.Devices, in.Facts.MountSources, in.Facts.NodeMounts = nil, nil, nil
	in.Defaults = Defaults{
		Seccomp:            in.Defaults.Seccomp,
		AppArmorProfile:    in.Defaults.AppArmorProfile,
		Sysctls:            in.Defaults.Sysctls,
		AllowedAnnotations: in.Defaults.AllowedAnnotations,
		Annotations:        in.Defaults.Annotations,
		SELinux:            in.Defaults.SELinux,
	}
	return fold(&in, sysctls, annotations(""), sizing)
}

const infraScore = -998

// infra returns the request for an infra container: locked down, and the same
// for all pods except for the node's PID namespace and the SELinux label. The
// score keeps the kernel from killing a whole pod to free a few pages (it is
// the kubelet's own value for pause processes).
func infra(pod *cri.PodSandboxConfig, args []string) *cri.ContainerConfig {
	sc := pod.GetLinux().GetSecurityContext()
	pid := cri.NamespaceMode_CONTAINER
	if sc.GetNamespaceOptions().GetPid() == cri.NamespaceMode_NODE {
		pid = cri.NamespaceMode_NODE
	}
	return &cri.ContainerConfig{
		Command: args,
		Linux: &cri.LinuxContainerConfig{
			Resources: &cri.LinuxContainerResources{CpuShares: 2, OomScoreAdj: infraScore},
			SecurityContext: &cri.LinuxContainerSecurityContext{
				NamespaceOptions: &cri.NamespaceOption{Pid: pid},
				Capabilities:     &cri.Capability{DropCapabilities: []string{"ALL"}},
				SelinuxOptions:   sc.GetSelinuxOptions(),
				Seccomp:          &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault},
				Apparmor:         &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault},
				MaskedPaths:      defaultMaskedPaths(),
				ReadonlyPaths:    defaultReadonlyPaths(),
				ReadonlyRootfs:   true,
				NoNewPrivs:       true,
			},
		},
	}
}

// ownKernelResources returns the limits of a runtime sandbox with its own kernel: the
// runtime sandbox's cgroup accounts for all of the containers' usage, so its limits are
// the sum of theirs plus the pod's overhead for such a kernel. A limit that the
// request leaves open is not set: the pod's own cgroup may have one.
//
// A virtual machine is as large as the limits of all of its containers
// together, and this one would double it. So it has none, as in containerd: its
// cgroup is in the pod's.
func ownKernelResources(pod *cri.PodSandboxConfig, machine bool) *cri.LinuxContainerResources {
	r, over := pod.GetLinux().GetResources(), pod.GetLinux().GetOverhead()
	sum := &cri.LinuxContainerResources{
		OomScoreAdj: infraScore,
		CpuShares:   r.GetCpuShares() + over.GetCpuShares(),
	}
	if machine {
		return sum
	}
	sum.CpuPeriod = r.GetCpuPeriod()
	if quota := r.GetCpuQuota(); quota > 0 {
		sum.CpuQuota = quota
		if p := over.GetCpuPeriod(); p > 0 && over.GetCpuQuota() > 0 {
			sum.CpuQuota += over.GetCpuQuota() * r.GetCpuPeriod() / p
		}
	}
	if memory := r.GetMemoryLimitInBytes(); memory > 0 {
		sum.MemoryLimitInBytes = memory + max(over.GetMemoryLimitInBytes(), 0)
	}
	return sum
}

// OwnKernelResources returns the limits of a runtime sandbox with its own
// kernel, which may be a virtual machine.
func OwnKernelResources(pod *cri.PodSandboxConfig, machine bool, host Host) (*specs.LinuxResources, error) {
	return Resources(ownKernelResources(pod, machine), host)
}

// fold applies the rules that every container has, then the given ones. The
// order matters where a rule reads what an earlier one wrote: devices look at
// the mounts, seccomp at the capabilities.
func fold(in *Input, more ...rule) (*specs.Spec, error) {
	in.base = in.Defaults.Base.spec()
	s := &specs.Spec{
		Version: ociVersion(in.Facts.Features),
		Process: &specs.Process{},
		Root:    &specs.Root{},
		Linux:   &specs.Linux{},
	}
	rules := []rule{
		privilege, root, command, environment, workdir, identity,
		capabilities, limits, namespaces, userNamespace, mounts, pathMasks,
		resources, devices, appArmorProfile, seLinuxLabels, seccomp, base,
	}
	for _, apply := range append(rules, more...) {
		if err := apply(in, s); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func root(in *Input, s *specs.Spec) error {
	s.Root.Path = in.Facts.Rootfs
	s.Root.Readonly = in.security().GetReadonlyRootfs() || in.Defaults.ReadOnly
	return nil
}

func invalid(format string, args ...any) error { return wrap(fault.Invalid, format, args) }

func unimplemented(format string, args ...any) error {
	return wrap(fault.Unimplemented, format, args)
}

func precondition(format string, args ...any) error {
	return wrap(fault.Precondition, format, args)
}

// wrap puts the sentinel behind the text. Errors among args stay visible to
// errors.Is where the format says %w.
func wrap(sentinel error, format string, args []any) error {
	return fmt.Errorf(format+": %w", append(slices.Clone(args), sentinel)...)
}
