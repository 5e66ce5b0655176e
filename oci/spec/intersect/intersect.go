// Package intersect makes one seccomp filter of two. It forbids whatever one of them forbids, so it
// permits an operation only if both do (docs/decisions/0075-seccomp-profiles.md).
//
// A filter in the form of the OCI runtime spec has no order: what it says about a call is the
// strictest of the rules that match, and the runtimes do not agree on anything else. The result is
// a filter in which at most one action applies to a call beside the default one, so that it means
// the same to all of them. What such a filter cannot say is denied.
package intersect

import (
	"cmp"
	"maps"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Of returns the intersection of two filters on a node of an architecture. If both forbid a call
// with an error, the result has that of a rule rather than that of a default action, and that of
// the first filter rather than that of the second. The listener is that of the second filter.
func Of(first, second *specs.LinuxSeccomp, native specs.Arch) *specs.LinuxSeccomp {
	out := &specs.LinuxSeccomp{
		Architectures: archs(first, second, native),
		Flags:         flags(first.Flags, second.Flags),
	}
	multiplexed := slices.ContainsFunc(append([]specs.Arch{native}, out.Architectures...), multiplexes)
	a, b := read(first, multiplexed), read(second, multiplexed)
	fallback := stricter(a.fallback, b.fallback)
	out.DefaultAction, out.DefaultErrnoRet = fallback.action, fallback.errnoRet()
	groups := map[string]*group{}
	for _, name := range names(a, b) {
		for _, r := range a.of(name).and(b.of(name)).under(fallback) {
			key := r.key()
			if groups[key] == nil {
				groups[key] = &group{rule: r}
			}
			groups[key].names = append(groups[key].names, name)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		out.Syscalls = append(out.Syscalls, groups[key].syscall())
	}
	if uses(out, specs.ActNotify) {
		out.ListenerPath, out.ListenerMetadata = second.ListenerPath, second.ListenerMetadata
	} else { // the kernel refuses it without a listener
		out.Flags = slices.DeleteFunc(out.Flags, func(f specs.LinuxSeccompFlag) bool { return f == specs.LinuxSeccompFlagWaitKillableRecv })
	}
	return out
}

// group is a rule with the system calls to which it applies.
type group struct {
	rule
	names []string
}

func (g *group) syscall() specs.LinuxSyscall {
	return specs.LinuxSyscall{Names: g.names, Action: g.action, ErrnoRet: g.errnoRet(), Args: g.args()}
}

func uses(f *specs.LinuxSeccomp, action specs.LinuxSeccompAction) bool {
	return f.DefaultAction == action || slices.ContainsFunc(f.Syscalls, func(s specs.LinuxSyscall) bool { return s.Action == action })
}

// archs returns the architectures of both filters. A filter has the native one whether it lists it
// or not.
func archs(first, second *specs.LinuxSeccomp, native specs.Arch) (both []specs.Arch) {
	has := func(f *specs.LinuxSeccomp, a specs.Arch) bool {
		return a == native || slices.Contains(f.Architectures, a)
	}
	for _, a := range append([]specs.Arch{native}, first.Architectures...) {
		if a != "" && has(second, a) && !slices.Contains(both, a) {
			both = append(both, a)
		}
	}
	return both
}

// flags returns the flags of a filter. SPEC_ALLOW weakens the kernel's mitigations, so both filters
// must have it; of the others one is enough.
func flags(first, second []specs.LinuxSeccompFlag) (merged []specs.LinuxSeccompFlag) {
	for _, flag := range slices.Concat(first, second) {
		both := slices.Contains(first, flag) && slices.Contains(second, flag)
		if (both || flag != specs.LinuxSeccompFlagSpecAllow) && !slices.Contains(merged, flag) {
			merged = append(merged, flag)
		}
	}
	return merged
}

// names returns the system calls about which the filters say something, sorted. A filter that
// names a part of a multiplexer says something about the whole.
func names(filters ...*filter) []string {
	all := map[string]bool{}
	for _, f := range filters {
		for name := range f.rules {
			all[name] = true
			if whole := multiplexers[name]; whole != "" {
				all[whole] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// verdict is what a filter says about a call.
type verdict struct {
	action specs.LinuxSeccompAction
	errno  uint // of ActErrno and ActTrace
	ruled  bool // by a rule, not by the default action
}

func verdictOf(action specs.LinuxSeccompAction, errnoRet *uint, ruled bool) verdict {
	v := verdict{action: action, ruled: ruled}
	if v.hasErrno() {
		v.errno = uint(unix.EPERM)
		if errnoRet != nil {
			v.errno = *errnoRet
		}
	}
	return v
}

func (v verdict) hasErrno() bool { return v.action == specs.ActErrno || v.action == specs.ActTrace }

func (v verdict) errnoRet() *uint {
	if !v.hasErrno() {
		return nil
	}
	return &v.errno
}

// actions are the actions from the weakest to the strictest one, as the kernel orders them.
var actions = [][]specs.LinuxSeccompAction{
	{specs.ActAllow}, {specs.ActLog}, {specs.ActTrace}, {specs.ActNotify}, {specs.ActErrno}, {specs.ActTrap},
	{specs.ActKill, specs.ActKillThread}, {specs.ActKillProcess},
}

// rank returns the strictness of an action. An unknown one is the strictest.
func rank(action specs.LinuxSeccompAction) int {
	for i, same := range actions {
		if slices.Contains(same, action) {
			return i
		}
	}
	return len(actions)
}

func (v verdict) compare(other verdict) int { return cmp.Compare(rank(v.action), rank(other.action)) }

// stricter returns the stricter one of two verdicts; of equal ones that of a rule, or the first.
func stricter(a, b verdict) verdict {
	switch order := a.compare(b); {
	case order < 0, order == 0 && b.ruled && !a.ruled:
		return b
	}
	return a
}
