package spec

import (
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Input is all that a spec depends on.
type Input struct {
	Request  Request  // what is asked for
	Asked    Asked    // what annotations of the pod ask for
	Facts    Facts    // what was found or made for this container
	Defaults Defaults // the node's policy, equal for all containers of a handler

	base *specs.Spec // from Defaults.Base; never nil in a rule
}

// Request is what the kubelet sent, and the image it names.
type Request struct {
	Pod       *cri.PodSandboxConfig
	Container *cri.ContainerConfig
	Image     *imagespec.ImageConfig // nil: the image says nothing
	// PrivilegedPod says that the pod has privileged containers by now, if Pod does not.
	PrivilegedPod bool
}

// Asked is what annotations of the pod ask for, as far as a spec says it.
type Asked struct {
	Umask           *uint32                      // of the first process
	WritableCgroups bool                         // the container may make cgroups below its own; cgroup v2
	Resources       *cri.LinuxContainerResources // instead of the request's; nil: those
	InfraCPUs       string                       // on which the infra container runs; empty: all
	LogVolume       string                       // emptyDir volume in whose place the pod's logs are mounted; empty: none
	Seccomp         *Profile                     // of a container that the request leaves unconfined; nil: none
}

// Facts is what the caller resolved. Paths are the node's, absolute.
type Facts struct {
	PodID       string
	Rootfs      string   // mounted root file system
	Hostname    string   // of the pod, or of the node where the pod shares its network
	User        Identity // from ResolveUser; the zero value is root
	CgroupsPath string   // from CgroupsPath
	Namespaces  Namespaces
	Files       Files

	// MountSources runs parallel to the request's mounts and may be shorter:
	// where each really comes from (links resolved, image volume mounted).
	// Empty: the mount's host_path as it stands.
	MountSources []string

	// BindVolumes are volumes of the image, as MakeVolumes returns them, that stay
	// writable where the root file system is read-only.
	BindVolumes []string

	NodeMounts []*cri.Mount // what the container gets of the node's files; the request's mounts win

	Devices     []Device // the request's, from ResolveDevices
	HostDevices []Device // from HostDevices; given to privileged containers

	Seccomp *Profile // from ResolveSeccomp: the request's localhost profile

	SELinuxLevel string // that of the pod; the request's wins

	Host     Host               // from ResolveHost
	Features *features.Features // of the handler; nil: it does not tell

	// MountOptions lists mount options that a handler without Features is known
	// to understand ("rro").
	MountOptions []string

	IDMap bool // the handler can make id-mapped mounts

	// OwnKernel says that the handler runs the pod on a kernel of its own, in a
	// virtual machine or gVisor, where the pod's sysctls are yet to be set.
	OwnKernel bool
	// VirtualMachine says that this kernel is in a virtual machine.
	VirtualMachine bool
}

// Namespaces are the paths of namespaces to join. An empty path means a new
// namespace, or the node's where the pod asks for that.
type Namespaces struct {
	Net, IPC, UTS string
	PID           string // of the pod's infra container, or of the container that is the target
	User          string
}

// Files are made for the pod and mounted into its containers, unless the
// request mounts something there itself. Empty: not mounted.
type Files struct {
	ResolvConf, Hostname, Hosts string
	Shm                         string // directory; empty: the container gets a /dev/shm of its own
}

// Defaults is the node's policy.
type Defaults struct {
	Capabilities                CapSet // before the request adds and drops; from ParseCapabilities
	Ulimits                     []specs.POSIXRlimit
	Env                         []string // NAME=value, before the image's
	Sysctls                     map[string]string
	Devices                     []Device
	DeviceOwnership             bool  // requested devices belong to run_as_user and run_as_group
	PidsLimit                   int64 // 0: no limit
	ReadOnly                    bool
	Seccomp                     *Profile // RuntimeDefault; nil: DefaultProfile
	AppArmorProfile             string   // RuntimeDefault, loaded by the caller; empty: none
	AllowedAnnotations          []string // pod annotations that reach the runtime, by key or path.Match pattern
	AllowedContainerAnnotations []string // the same of the container's, which override the pod's
	Annotations                 []string // key=value, for every container
	SELinux                     *SELinux // nil: the node has none

	// PrivilegedWithoutHostDevices withholds the node's devices from privileged
	// containers; with AllDevicesAllowed these may make nodes of them and use those.
	PrivilegedWithoutHostDevices bool
	AllDevicesAllowed            bool

	WritableCgroups bool  // containers may make cgroups below their own; needs cgroup v2
	Base            *Base // nil: none
}

// writableCgroups tells whether the container may make cgroups below its own.
func (in *Input) writableCgroups() bool {
	return in.Defaults.WritableCgroups || in.Asked.WritableCgroups
}

func (in *Input) security() *cri.LinuxContainerSecurityContext {
	return in.Request.Container.GetLinux().GetSecurityContext()
}

func (in *Input) podSecurity() *cri.LinuxSandboxSecurityContext {
	return in.Request.Pod.GetLinux().GetSecurityContext()
}

func (in *Input) privileged() bool { return in.security().GetPrivileged() }

// hostNetwork tells whether the pod shares the node's network, and with it the
// node's UTS namespace.
func (in *Input) hostNetwork() bool {
	return in.podSecurity().GetNamespaceOptions().GetNetwork() == cri.NamespaceMode_NODE
}

// linuxFeatures is nil where the handler does not tell.
func (in *Input) linuxFeatures() *features.Linux {
	if in.Facts.Features == nil {
		return nil
	}
	return in.Facts.Features.Linux
}
