package spec

import (
	"encoding/json"
	"maps"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// Base is an OCI spec that the operator supplies: containerd's
// base_runtime_spec. It gives containers what neither the request nor crius's
// configuration decides: additional environment variables, rlimits and mounts,
// hooks, files of cgroup v2, and settings for which crius has no key
// (scheduler, I/O priority, CPU affinity of commands, RDT). Everything else in
// the file, such as namespaces and capabilities, has no effect.
type Base struct{ text []byte }

// ParseBase reads the JSON of a spec.
func ParseBase(text []byte) (*Base, error) {
	if err := json.Unmarshal(text, new(specs.Spec)); err != nil {
		return nil, err
	}
	return &Base{text}, nil
}

// spec returns a copy that shares nothing with another container's spec. Its
// Process, its Linux part and their resources are never nil.
func (b *Base) spec() *specs.Spec {
	s := &specs.Spec{}
	if b != nil {
		_ = json.Unmarshal(b.text, s) // ParseBase has checked it
	}
	if s.Process == nil {
		s.Process = &specs.Process{}
	}
	if s.Linux == nil {
		s.Linux = &specs.Linux{}
	}
	if s.Linux.Resources == nil {
		s.Linux.Resources = &specs.LinuxResources{}
	}
	return s
}

// baseMounts leaves out the tmpfs at /run that specs of containerd have by default:
// images have files there, and containerd leaves it out as well.
func (in *Input) baseMounts() []specs.Mount {
	return slices.DeleteFunc(in.base.Mounts, func(m specs.Mount) bool { return m.Destination == "/run" && m.Type == "tmpfs" })
}

// baseLimits returns the base's rlimits except those in more.
func (in *Input) baseLimits(more []specs.POSIXRlimit) []specs.POSIXRlimit {
	return slices.DeleteFunc(in.base.Process.Rlimits, func(limit specs.POSIXRlimit) bool {
		return slices.ContainsFunc(more, func(m specs.POSIXRlimit) bool { return m.Type == limit.Type })
	})
}

// base writes what no other rule writes.
func base(in *Input, s *specs.Spec) error {
	s.Hooks = in.base.Hooks
	s.Process.Scheduler = in.base.Process.Scheduler
	s.Process.IOPriority = in.base.Process.IOPriority
	s.Process.ExecCPUAffinity = in.base.Process.ExecCPUAffinity
	s.Linux.IntelRdt = in.base.Linux.IntelRdt
	if files := in.base.Linux.Resources.Unified; len(files) > 0 {
		maps.Copy(files, s.Linux.Resources.Unified)
		s.Linux.Resources.Unified = files
	}
	return nil
}
