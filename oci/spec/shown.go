package spec

import (
	"cmp"
	"encoding/json"
	"maps"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// WithLimits returns the JSON of a container's spec with the limits that are in force now, which
// updates have set since. What is no spec is returned as it is.
func WithLimits(text json.RawMessage, limits *cri.LinuxContainerResources, host Host) json.RawMessage {
	var s specs.Spec
	now, err := Resources(limits, host)
	if err != nil || json.Unmarshal(text, &s) != nil || s.Linux == nil || s.Linux.Resources == nil {
		return text
	}
	overlayLimits(s.Linux.Resources, now)
	shown, err := json.Marshal(s)
	if err != nil {
		return text
	}
	return shown
}

// OfPod returns the JSON of a spec that says of a pod without an infra container what that of one
// would say: its name, its annotations, and the namespaces that its containers join.
func OfPod(pod *cri.PodSandboxConfig, n Namespaces) (json.RawMessage, error) {
	s := specs.Spec{
		Version: specs.Version, Hostname: pod.GetHostname(), Annotations: pod.GetAnnotations(),
		Linux: &specs.Linux{CgroupsPath: pod.GetLinux().GetCgroupParent()},
	}
	for _, one := range []specs.LinuxNamespace{
		{Type: specs.NetworkNamespace, Path: n.Net}, {Type: specs.IPCNamespace, Path: n.IPC},
		{Type: specs.UTSNamespace, Path: n.UTS}, {Type: specs.UserNamespace, Path: n.User},
	} {
		if one.Path != "" {
			s.Linux.Namespaces = append(s.Linux.Namespaces, one)
		}
	}
	return json.Marshal(s)
}

func overlayLimits(r, now *specs.LinuxResources) {
	if now.CPU != nil {
		if r.CPU == nil {
			r.CPU = &specs.LinuxCPU{}
		}
		r.CPU.Shares, r.CPU.Quota = cmp.Or(now.CPU.Shares, r.CPU.Shares), cmp.Or(now.CPU.Quota, r.CPU.Quota)
		r.CPU.Period = cmp.Or(now.CPU.Period, r.CPU.Period)
		r.CPU.Cpus, r.CPU.Mems = cmp.Or(now.CPU.Cpus, r.CPU.Cpus), cmp.Or(now.CPU.Mems, r.CPU.Mems)
	}
	if now.Memory != nil {
		if r.Memory == nil {
			r.Memory = &specs.LinuxMemory{}
		}
		r.Memory.Limit, r.Memory.Swap = cmp.Or(now.Memory.Limit, r.Memory.Limit), cmp.Or(now.Memory.Swap, r.Memory.Swap)
	}
	if len(now.HugepageLimits) > 0 {
		r.HugepageLimits = now.HugepageLimits
	}
	if len(now.Unified) > 0 && r.Unified == nil {
		r.Unified = map[string]string{}
	}
	maps.Copy(r.Unified, now.Unified)
}
