package blueprint

import (
	"cmp"
	"fmt"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/records"
)

// PodFacts are what the specs of all containers of a pod depend on beside the node.
type PodFacts struct {
	ID        string
	Plan      *records.PodPlan
	Files     files.Pod
	Handler   oci.Handler
	Abilities *oci.Abilities
	Asked     annotation.Asked
	Defaults  spec.Defaults // as the handler changes them
	Hostname  string
	InfraPID  int // of the process that holds the runtime sandbox; 0: it is not known, or there is none
}

// Spec returns what the specs of all containers of a pod have in common.
func (p *Planner) Spec(pod PodFacts) spec.Input {
	plan, paths := pod.Plan, pod.Plan.Namespaces.Paths()
	facts := spec.Facts{
		PodID:      pod.ID,
		Hostname:   pod.Hostname,
		Namespaces: spec.Namespaces{Net: paths.Net, IPC: paths.IPC, UTS: paths.UTS, User: paths.User},
		Files: spec.Files{
			ResolvConf: pod.Files.ResolvConf(),
			Hostname:   pod.Files.Hostname(),
			Shm:        "/dev/shm",
		},
		Host:     p.Host,
		Features: pod.Abilities.Features,
		IDMap:    pod.Abilities.IDMap,

		CgroupNamespaces: pod.Abilities.CgroupNamespaces,

		OwnKernel: plan.Sandboxed,

		VirtualMachine: plan.Sandboxed && pod.Abilities.VirtualMachine,
		SELinuxLevel:   plan.SELinuxLevel,
	}
	if plan.Namespaces.IPC {
		facts.Files.Shm = pod.Files.Shm()
	}
	if pod.Abilities.RecursiveReadOnly {
		facts.MountOptions = []string{"rro"}
	}
	if pod.InfraPID != 0 {
		// The containers don't join this process's namespace on the node: the runtime only
		// wants the same path for all of them.
		facts.Namespaces.PID = fmt.Sprintf("/proc/%d/ns/pid", pod.InfraPID)
	}
	asked, defaults := pod.Asked, pod.Defaults
	defaults.AllowedAnnotations = asked.Allowed
	return spec.Input{
		Request:  spec.Request{Pod: plan.Config.M},
		Asked:    spec.Asked{Umask: asked.Umask, WritableCgroups: asked.WritableCgroups, InfraCPUs: p.infraCPUs(plan, asked), LogVolume: asked.LogVolume},
		Facts:    facts,
		Defaults: defaults,
	}
}

// infraCPUs returns the CPUs of the pod's infra container; empty: all. If that one holds a
// runtime sandbox, all containers run there.
func (p *Planner) infraCPUs(plan *records.PodPlan, asked annotation.Asked) string {
	if plan.Sandboxed {
		return asked.InfraCPUs()
	}
	return cmp.Or(asked.InfraCPUs(), p.InfraCPUs)
}

// OfHandler returns the node's defaults as a handler's options change them, except for the
// files that these name.
func OfHandler(defaults spec.Defaults, handler oci.Handler) spec.Defaults {
	defaults.AllowedContainerAnnotations = handler.AllowedContainerAnnotations
	defaults.Annotations = handler.DefaultAnnotations
	defaults.PrivilegedWithoutHostDevices = handler.PrivilegedWithoutHostDevices
	defaults.AllDevicesAllowed = handler.AllDevicesAllowed
	defaults.WritableCgroups = handler.CgroupWritable
	return defaults
}
