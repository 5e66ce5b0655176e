package nri

import (
	"maps"
	"strings"
	"time"

	"github.com/containerd/nri/pkg/api"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Spec is an OCI runtime spec.
type Spec = specs.Spec

// Namespace is a namespace that the containers of a pod share.
type Namespace = specs.LinuxNamespace

// Pod is a pod as plugins see it.
type Pod struct {
	ID         string
	Handler    string
	Config     *cri.PodSandboxConfig
	PID        int      // of the infra container; 0: none
	IPs        []string // the primary one first
	Namespaces []Namespace
	Overhead   *Resources // nil: none
	Resources  *Resources // the sum of the containers'; nil: unknown
}

// Container is a container as plugins see it.
type Container struct {
	ID     string
	Pod    *Pod
	Config *cri.ContainerConfig
	// Annotations are those of Config as plugins have adjusted them, which CreateContainer notes;
	// nil: they have not.
	Annotations map[string]string

	Spec  *Spec
	State cri.ContainerState
	PID   int // 0: not created yet, or dead

	CreatedAt, StartedAt, FinishedAt time.Time

	ExitCode        int32
	Reason, Message string

	ImageDigest string // of the manifest, sha256:…; empty: unknown
	ImageID     string // digest of the image's configuration
	CDIDevices  []string
}

func (p *Pod) message() *api.PodSandbox {
	metadata := p.Config.GetMetadata()
	return &api.PodSandbox{
		Id:             p.ID,
		Name:           metadata.GetName(),
		Uid:            metadata.GetUid(),
		Namespace:      metadata.GetNamespace(),
		Labels:         p.Config.GetLabels(),
		Annotations:    p.Config.GetAnnotations(),
		RuntimeHandler: p.Handler,
		Pid:            uint32(p.PID),
		Ips:            p.IPs,
		Linux: &api.LinuxPodSandbox{
			PodOverhead:  api.FromOCILinuxResources(p.Overhead, nil),
			PodResources: api.FromOCILinuxResources(p.Resources, nil),
			CgroupParent: p.Config.GetLinux().GetCgroupParent(),
			Namespaces:   api.FromOCILinuxNamespaces(p.Namespaces),
		},
	}
}

func (c *Container) message() *api.Container {
	m := &api.Container{
		Id:            c.ID,
		PodSandboxId:  c.Pod.ID,
		Name:          c.Config.GetMetadata().GetName(),
		State:         stateOf(c.State),
		Labels:        c.Config.GetLabels(),
		Annotations:   map[string]string{}, // not Config's own: the library writes to it
		Pid:           uint32(c.PID),
		CreatedAt:     nanoseconds(c.CreatedAt),
		StartedAt:     nanoseconds(c.StartedAt),
		FinishedAt:    nanoseconds(c.FinishedAt),
		ExitCode:      c.ExitCode,
		StatusReason:  c.Reason,
		StatusMessage: c.Message,
		Image: &api.Image{
			Name:         c.Config.GetImage().GetUserSpecifiedImage(),
			Digest:       c.ImageDigest,
			ConfigDigest: digest(c.ImageID),
		},
	}
	if c.Annotations != nil {
		maps.Copy(m.Annotations, c.Annotations)
	} else {
		maps.Copy(m.Annotations, c.Config.GetAnnotations())
	}
	if m.Image.Name == "" {
		m.Image.Name = c.Config.GetImage().GetImage()
	}
	for _, name := range c.CDIDevices {
		m.CDIDevices = append(m.CDIDevices, &api.CDIDevice{Name: name})
	}
	describeSpec(m, c.Spec)
	m.Linux.SeccompProfile = seccompProfile(c.Config.GetLinux().GetSecurityContext())
	return m
}

// describeSpec fills in the container's process and resources.
func describeSpec(m *api.Container, s *Spec) {
	m.Linux = &api.LinuxContainer{}
	if s == nil {
		return
	}
	m.Mounts = api.FromOCIMounts(s.Mounts)
	m.Hooks = api.FromOCIHooks(s.Hooks)
	if p := s.Process; p != nil {
		m.Args, m.Env = p.Args, p.Env
		m.User = &api.User{Uid: p.User.UID, Gid: p.User.GID, AdditionalGids: p.User.AdditionalGids}
		for _, l := range p.Rlimits {
			m.Rlimits = append(m.Rlimits, &api.POSIXRlimit{Type: l.Type, Hard: l.Hard, Soft: l.Soft})
		}
		m.Linux.OomScoreAdj = api.Int(p.OOMScoreAdj)
		m.Linux.IoPriority = api.FromOCILinuxIOPriority(p.IOPriority)
		m.Linux.Scheduler = api.FromOCILinuxScheduler(p.Scheduler)
	}
	l := s.Linux
	if l == nil {
		return
	}
	m.Linux.Namespaces = api.FromOCILinuxNamespaces(l.Namespaces)
	m.Linux.Devices = api.FromOCILinuxDevices(l.Devices)
	m.Linux.Resources = api.FromOCILinuxResources(l.Resources, nil)
	m.Linux.CgroupsPath = l.CgroupsPath
	m.Linux.Sysctl = maps.Clone(l.Sysctl) // the library writes to it
	m.Linux.NetDevices = api.FromOCILinuxNetDevices(l.NetDevices)
	if l.Seccomp != nil {
		m.Linux.SeccompPolicy = api.FromOCILinuxSeccomp(l.Seccomp)
	}
	if rdt := l.IntelRdt; rdt != nil {
		m.Linux.Rdt = &api.LinuxRdt{ClosId: api.String(rdt.ClosID), Schemata: api.RepeatedString(rdt.Schemata), EnableMonitoring: api.Bool(rdt.EnableMonitoring)}
	}
}

func stateOf(s cri.ContainerState) api.ContainerState {
	switch s {
	case cri.ContainerState_CONTAINER_CREATED:
		return api.ContainerState_CONTAINER_CREATED
	case cri.ContainerState_CONTAINER_RUNNING:
		return api.ContainerState_CONTAINER_RUNNING
	case cri.ContainerState_CONTAINER_EXITED:
		return api.ContainerState_CONTAINER_STOPPED
	default:
		return api.ContainerState_CONTAINER_UNKNOWN
	}
}

func seccompProfile(sc *cri.LinuxContainerSecurityContext) *api.SecurityProfile {
	profile := sc.GetSeccomp()
	switch {
	case sc.GetPrivileged() || profile == nil || profile.GetProfileType() == cri.SecurityProfile_Unconfined:
		return &api.SecurityProfile{ProfileType: api.SecurityProfile_UNCONFINED}
	case profile.GetProfileType() == cri.SecurityProfile_Localhost:
		return &api.SecurityProfile{ProfileType: api.SecurityProfile_LOCALHOST, LocalhostRef: profile.GetLocalhostRef()}
	default:
		return &api.SecurityProfile{ProfileType: api.SecurityProfile_RUNTIME_DEFAULT}
	}
}

// nanoseconds returns nanoseconds since 1970; 0: not happened yet.
func nanoseconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

// digest returns the digest of an image that the store names by hexadecimal
// digits alone.
func digest(id string) string {
	if id == "" || strings.Contains(id, ":") {
		return id
	}
	return "sha256:" + id
}
