package spec

import (
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Input is everything on which a spec depends.
type Input struct {
	Request  Request  // what the kubelet requested
	Asked    Asked    // what annotations of the pod request
	Facts    Facts    // what was resolved or made for this container
	Defaults Defaults // the node's policy, the same for all containers of a handler

	base *specs.Spec // from Defaults.Base; never nil in a rule
}

// Request is the kubelet's request, with the configuration of the image that it
// names.
type Request struct {
	Pod       *cri.PodSandboxConfig
	Container *cri.ContainerConfig
	Image     *imagespec.ImageConfig // nil: no image configuration
	// PrivilegedPod says that the pod has privileged containers by now even if
	// Pod does not say so.
	PrivilegedPod bool
}

// Asked is what annotations of the pod request, where a spec can express it.
type Asked struct {
	Umask           *uint32                      // of the first process
	WritableCgroups bool                         // the container may make cgroups below its own; cgroup v2
	Resources       *cri.LinuxContainerResources // replaces the request's; nil: the request's apply
	InfraCPUs       string                       // CPUs of the infra container; empty: all
	LogVolume       string                       // emptyDir volume that is replaced by a mount of the pod's logs; empty: none
	Ulimits         []specs.POSIXRlimit          // come before the node's
	Seccomp         *Profile                     // for a container that the request leaves unconfined; nil: none
}

// Facts is what the caller resolved. Paths are absolute paths on the node.
type Facts struct {
	PodID       string
	Rootfs      string   // mounted root file system
	Hostname    string   // of the pod, or of the node if the pod shares its network
	User        Identity // from ResolveUser; the zero value is root
	CgroupsPath string   // from CgroupsPath
	Namespaces  Namespaces
	Files       Files

	// MountSources runs parallel to the request's mounts and may be shorter: the
	// real source of each (links resolved, image volume mounted). Empty: the
	// mount's host_path as it stands.
	MountSources []string

	// BindVolumes are volumes of the image, as MakeVolumes returns them, that
	// stay writable when the root file system is read-only.
	BindVolumes []string

	NodeMounts []*cri.Mount // mounts of the node's files that the handler or node adds; the request's mounts win

	Devices     []Device // the request's, from ResolveDevices
	HostDevices []Device // from HostDevices; given to privileged containers

	Seccomp       *Profile // from ResolveSeccomp: the request's localhost profile
	PulledSeccomp *Profile // that the request names by oci_ref, from ParsePulledProfile

	SELinuxLevel string // the pod's; the request's wins

	OpenFiles uint64 // from OpenFiles, when the container is created

	Host     Host               // from ResolveHost
	Features *features.Features // of the handler; nil: it does not report them

	// MountOptions lists mount options that a handler without Features is known
	// to understand ("rro").
	MountOptions []string

	IDMap            bool // the handler can make id-mapped mounts
	CgroupNamespaces bool // the handler can make cgroup namespaces

	// CgroupOptions are those of the node's cgroup v2 mount, from cgroup.Options; for a container
	// to which they matter.
	CgroupOptions []string

	// OwnKernel says that the handler runs the pod on a kernel of its own, in a
	// virtual machine or gVisor. The runtime must still set the pod's sysctls
	// there.
	OwnKernel bool
	// VirtualMachine says that this kernel is in a virtual machine.
	VirtualMachine bool
}

// Namespaces are the paths of namespaces to join. An empty path means a new
// namespace, or the node's if the pod asks for it.
type Namespaces struct {
	Net, IPC, UTS string
	PID           string // of the pod's infra container, or of the target container
	User          string
}

// Files are made for the pod and mounted into its containers, unless the
// request mounts something there itself. Empty: not mounted.
type Files struct {
	ResolvConf, Hostname, Hosts string
	Shm                         string // directory; empty: the container gets its own /dev/shm
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
	AllowedContainerAnnotations []string // the same for annotations of the container, which override the pod's
	Annotations                 []string // key=value, for every container
	SELinux                     *SELinux // nil: the node has none

	// PrivilegedWithoutHostDevices withholds the node's devices from privileged
	// containers; with AllDevicesAllowed these may make their own device nodes
	// and use them.
	PrivilegedWithoutHostDevices bool
	AllDevicesAllowed            bool

	WritableCgroups bool  // containers may make cgroups below their own; needs cgroup v2
	Base            *Base // nil: none
}

// writableCgroups reports whether the container may make cgroups below its own.
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

// hostNetwork reports whether the pod shares the node's network, and with it
// the node's UTS namespace.
func (in *Input) hostNetwork() bool {
	return in.podSecurity().GetNamespaceOptions().GetNetwork() == cri.NamespaceMode_NODE
}

// linuxFeatures is nil if the handler does not report its features.
func (in *Input) linuxFeatures() *features.Linux {
	if in.Facts.Features == nil {
		return nil
	}
	return in.Facts.Features.Linux
}
