package spec

import (
	"fmt"
	"path"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/oci/spec/intersect"
)

// seccomp writes the profile that the request chooses, fitted to the container,
// or the one that the pod requests by annotation. CRI: no profile requested
// means none; a privileged container has none.
func seccomp(in *Input, s *specs.Spec) error {
	sc := in.security()
	want, err := chooseProfile(sc.GetSeccomp(), sc.GetSeccompProfilePath(), unconfined)
	if err != nil {
		return fmt.Errorf("seccomp profile: %w", err)
	}
	if in.privileged() || want.confinement == unconfined && in.Asked.Seccomp == nil {
		return nil
	}
	profile := in.Defaults.Seccomp
	switch {
	case want.confinement == unconfined:
		profile = in.Asked.Seccomp
	case want.path() != "":
		if err := checkProfilePath(want.path()); err != nil {
			return err
		}
		if profile = in.Facts.Seccomp; profile == nil {
			return precondition("seccomp profile %q was not loaded", want.path())
		}
	case profile == nil:
		profile = DefaultProfile()
	}
	if !in.seccompEnabled() {
		return unimplemented("seccomp is not available on this node or in the pod's runtime handler")
	}
	if s.Linux.Seccomp, err = in.fit(profile, s.Process.Capabilities); err != nil || want.confinement != pulled {
		return err
	}
	if in.Facts.PulledSeccomp == nil {
		return precondition("seccomp profile %q was not loaded", want.ref)
	}
	filter, err := in.fit(in.Facts.PulledSeccomp, s.Process.Capabilities)
	if err != nil {
		return fmt.Errorf("seccomp profile %q: %w", want.ref, err)
	}
	s.Linux.Seccomp = intersect.Of(filter, s.Linux.Seccomp, nativeArch(in.Facts.Host.Arch))
	if n := len(s.Linux.Seccomp.Syscalls); n > maxMergedRules {
		return invalid("seccomp profile %q: together with its base profile it has %d rules, at most %d are allowed; use fewer conditions on arguments", want.ref, n, maxMergedRules)
	}
	return nil
}

// maxMergedRules bounds the filter of a pulled profile. The kernel takes 4096 instructions, of which
// a condition needs several on each architecture.
const maxMergedRules = 512

func checkProfilePath(ref string) error {
	if !path.IsAbs(ref) || path.Clean(ref) != ref {
		return invalid("seccomp profile %q: a localhost profile must be an absolute path without . or ..", ref)
	}
	return nil
}

func (in *Input) seccompEnabled() bool {
	f := in.linuxFeatures()
	if f != nil && f.Seccomp != nil && f.Seccomp.Enabled != nil && !*f.Seccomp.Enabled {
		return false
	}
	return in.Facts.Host.Seccomp
}

// fit resolves a profile's conditions for a container with these capabilities.
// It leaves out what the runtime does not know, provided that this does not
// weaken the profile.
func (in *Input) fit(p *Profile, caps *specs.LinuxCapabilities) (*specs.LinuxSeccomp, error) {
	out := &specs.LinuxSeccomp{
		DefaultAction:    p.DefaultAction,
		DefaultErrnoRet:  clonePtr(p.DefaultErrnoRet),
		Architectures:    in.seccompArchs(p),
		ListenerPath:     p.ListenerPath,
		ListenerMetadata: p.ListenerMetadata,
	}
	var err error
	if out.Flags, err = in.seccompFlags(p); err != nil {
		return nil, err
	}
	if !in.knowsAction(p.DefaultAction) {
		return nil, unimplemented("the pod's runtime handler does not support seccomp action %s", p.DefaultAction)
	}
	for _, r := range p.Syscalls {
		if !in.applies(r, caps.Bounding) {
			continue
		}
		if !in.knowsRule(r) {
			if r.Action == specs.ActAllow {
				continue
			}
			return nil, unimplemented("the pod's runtime handler does not support seccomp action %s or an operator used with it", r.Action)
		}
		out.Syscalls = append(out.Syscalls, specs.LinuxSyscall{
			Names:    slices.Clone(r.Names),
			Action:   r.Action,
			ErrnoRet: clonePtr(r.ErrnoRet),
			Args:     slices.Clone(r.Args),
		})
	}
	return out, nil
}

// seccompFlags returns the profile's flags without those that the runtime does not know and that neither forbid
// anything nor are seen from outside. runc below 1.2 knows none, and its features have no list of them.
func (in *Input) seccompFlags(p *Profile) ([]specs.LinuxSeccompFlag, error) {
	f := in.linuxFeatures()
	if f == nil || f.Seccomp == nil || f.Seccomp.Actions == nil {
		return slices.Clone(p.Flags), nil
	}
	known := f.Seccomp.SupportedFlags
	if known == nil {
		known = f.Seccomp.KnownFlags
	}
	var kept []specs.LinuxSeccompFlag
	for _, flag := range p.Flags {
		switch {
		case slices.Contains(known, string(flag)):
			kept = append(kept, flag)
		case !slices.Contains(dispensableFlags(), flag):
			return nil, unimplemented("the pod's runtime handler does not support seccomp flag %.60q: update the runtime, or take the flag from the profile", flag)
		}
	}
	return kept, nil
}

// dispensableFlags: a filter of one thread needs no synchronization, a mitigation that stays on costs time, and
// the last one is about signals while an agent decides.
func dispensableFlags() []specs.LinuxSeccompFlag {
	return []specs.LinuxSeccompFlag{"SECCOMP_FILTER_FLAG_TSYNC", specs.LinuxSeccompFlagSpecAllow, specs.LinuxSeccompFlagWaitKillableRecv}
}

// seccompArchs returns the architectures whose system calls the filter covers.
// The kernel kills a process that uses any other.
func (in *Input) seccompArchs(p *Profile) []specs.Arch {
	archs := slices.Clone(p.Architectures)
	for _, group := range p.ArchMap {
		if group.Arch == nativeArch(in.Facts.Host.Arch) {
			archs = append([]specs.Arch{group.Arch}, group.SubArchs...)
		}
	}
	f := in.linuxFeatures()
	if f == nil || f.Seccomp == nil || f.Seccomp.Archs == nil {
		return archs
	}
	return slices.DeleteFunc(archs, func(a specs.Arch) bool { return !slices.Contains(f.Seccomp.Archs, string(a)) })
}

func (in *Input) applies(r Rule, caps []string) bool {
	host := in.Facts.Host
	hasCap := func(name string) bool { return slices.Contains(caps, name) }
	for _, name := range r.Includes.Caps {
		if !hasCap(name) {
			return false
		}
	}
	if len(r.Includes.Arches) > 0 && !slices.Contains(r.Includes.Arches, host.Arch) {
		return false
	}
	if r.Includes.MinKernel != "" && !host.kernelAtLeast(r.Includes.MinKernel) {
		return false
	}
	return !slices.ContainsFunc(r.Excludes.Caps, hasCap) &&
		!slices.Contains(r.Excludes.Arches, host.Arch) &&
		(r.Excludes.MinKernel == "" || !host.kernelAtLeast(r.Excludes.MinKernel))
}

func (in *Input) knowsAction(action specs.LinuxSeccompAction) bool {
	f := in.linuxFeatures()
	return f == nil || f.Seccomp == nil || f.Seccomp.Actions == nil || slices.Contains(f.Seccomp.Actions, string(action))
}

func (in *Input) knowsRule(r Rule) bool {
	f := in.linuxFeatures()
	if !in.knowsAction(r.Action) {
		return false
	}
	if f == nil || f.Seccomp == nil || f.Seccomp.Operators == nil {
		return true
	}
	return !slices.ContainsFunc(r.Args, func(a specs.LinuxSeccompArg) bool {
		return !slices.Contains(f.Seccomp.Operators, string(a.Op))
	})
}
