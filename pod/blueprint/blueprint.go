// Package blueprint plans pods and containers: from the request, the image and the node's
// policy it derives the plan that goes on record, and the input of the OCI spec. It is pure:
// no function takes a lock, reads a file, starts a process or changes the node. The engine
// finds out what only the node knows (the hostname, the abilities of a runtime, the files
// that a handler names) and passes it on. Three things are asked for while a plan is made:
// labels and the tuning of CPUs through the interfaces Labels and Tuner, and the quota of a
// cgroup through a Quota.
package blueprint

import (
	"cmp"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/oci/tuning"
	"github.com/crius-run/crius/pod/records"
)

// Planner plans the pods and containers of one node. It holds what their plans depend on
// beside the requests, and never changes.
type Planner struct {
	Boot     string        // id of this boot
	Host     spec.Host     // facts about the node
	Defaults spec.Defaults // the node's policy, before a handler changes it

	NamespacesDir string // where namespaces are pinned
	CgroupDriver  string // cgroupfs or systemd
	CgroupParent  string // of pods whose request names none; empty: the driver's usual one
	CgroupPrefix  string // of the names of new cgroups; empty: spec.CgroupPrefix
	InfraCPUs     string // of infra containers; empty: all

	AllowedDevices []string                       // that annotations may ask for
	AllowedUlimits []string                       // the same, with the largest values
	Workloads      map[string]annotation.Workload // that pods may be in, by name
}

// Labels returns the SELinux context of a container's files.
type Labels interface {
	Files(pod *records.PodPlan, c *cri.ContainerConfig) (string, error)
}

// Tuner plans what the node does for a container that has CPUs of its own.
type Tuner interface {
	Plan(c tuning.Container) (*tuning.Plan, *cri.LinuxContainerResources, error)
}

// Asked reads what the pod asks for by annotations, as far as its handler and the node allow
// it.
func (p *Planner) Asked(pod *records.PodPlan, handler oci.Handler) (annotation.Asked, error) {
	users := pod.Config.M.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions()
	return annotation.Read(pod.Config.M.GetAnnotations(), annotation.Rules{
		UserNamespace: users != nil && users.GetMode() == cri.NamespaceMode_POD,
		Allowed:       handler.AllowedAnnotations,
		Devices:       p.AllowedDevices,
		Ulimits:       p.AllowedUlimits,
		Workloads:     p.Workloads,
	})
}

// Cgroup returns the cgroup of a container of the pod: the path that the runtime gets, and
// the path below the cgroup mount. An empty prefix is spec.CgroupPrefix.
func (p *Planner) Cgroup(pod *cri.PodSandboxConfig, prefix, id string) (path, cgroupfs string, err error) {
	path, err = spec.CgroupsPath(p.CgroupDriver, cmp.Or(prefix, spec.CgroupPrefix), p.cgroupParent(pod), id)
	if err != nil {
		return "", "", err
	}
	cgroupfs, err = spec.CgroupfsPath(p.CgroupDriver, path)
	return path, cgroupfs, err
}

func (p *Planner) cgroupParent(pod *cri.PodSandboxConfig) string {
	if parent := cmp.Or(pod.GetLinux().GetCgroupParent(), p.CgroupParent); parent != "" {
		return parent
	}
	if p.CgroupDriver == spec.Systemd {
		return "system.slice"
	}
	return "/crius"
}

// EnoughMemory refuses a memory limit below what the runtime itself needs. The handler has
// this name.
func EnoughMemory(handler oci.Handler, name string, r *cri.LinuxContainerResources) error {
	if limit := r.GetMemoryLimitInBytes(); limit > 0 && limit < handler.MinMemory {
		return fmt.Errorf("memory_limit_in_bytes %d is less than %d, the minimum for runtime handler %s: %w", limit, handler.MinMemory, name, fault.Invalid)
	}
	return nil
}
