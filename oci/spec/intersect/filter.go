package intersect

import (
	"fmt"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// filter is a filter by system calls.
type filter struct {
	fallback    verdict // of calls without a rule
	rules       map[string][]specs.LinuxSyscall
	multiplexed bool // an architecture of the filter has multiplexers
}

func read(f *specs.LinuxSeccomp, multiplexed bool) *filter {
	out := &filter{verdictOf(f.DefaultAction, f.DefaultErrnoRet, false), map[string][]specs.LinuxSyscall{}, multiplexed}
	for _, r := range f.Syscalls {
		for _, name := range r.Names {
			out.rules[name] = append(out.rules[name], r)
		}
	}
	return out
}

// decision is what a filter says about one system call: then if one of the conditions when is met,
// otherwise other, which is at least as strict.
type decision struct {
	when        alternatives
	then, other verdict
}

func always(v verdict) decision { return decision{alternatives{nil}, v, v} }

// and returns the decision that two filters make together.
func (d decision) and(e decision) decision {
	when, _ := d.when.and(e.when)
	return decision{when, stricter(d.then, e.then), stricter(d.other, e.other)}
}

// of returns the filter's decision about a system call.
func (f *filter) of(name string) decision {
	d := f.decide(f.rules[name])
	if !f.multiplexed {
		return d
	}
	// libseccomp applies a rule about a part of a multiplexer to calls of the multiplexer, and a
	// call by the one way must not be allowed if it is forbidden by the other.
	if whole := multiplexers[name]; whole != "" && len(f.rules[whole]) > 0 {
		d = d.and(always(f.decide(f.rules[whole]).other)) // its arguments are others
	}
	if len(f.rules[name]) == 0 {
		for part, whole := range multiplexers {
			if whole == name && len(f.rules[part]) > 0 {
				d = d.and(always(f.strictest(f.rules[part])))
			}
		}
	}
	return d
}

// strictest returns the strictest verdict of rules and the default action.
func (f *filter) strictest(rules []specs.LinuxSyscall) verdict {
	v := f.fallback
	for _, r := range rules {
		v = stricter(v, verdictOf(r.Action, r.ErrnoRet, true))
	}
	return v
}

// decide returns the decision that rules about one system call make: the strictest of those that
// match counts. If it depends on arguments which of several actions that is, the decision is
// stricter than the rules.
func (f *filter) decide(rules []specs.LinuxSyscall) decision {
	rest, certain := f.fallback, false
	for _, r := range rules {
		if len(r.Args) == 0 {
			v := verdictOf(r.Action, r.ErrnoRet, true)
			if certain {
				v = stricter(v, rest)
			}
			rest, certain = v, true
		}
	}
	permits, denials := conditions{}, conditions{}
	for _, r := range rules {
		v := verdictOf(r.Action, r.ErrnoRet, true)
		switch weaker := v.compare(rest) < 0; {
		case len(r.Args) == 0, weaker && certain: // a weaker condition beside a rule for all arguments changes nothing
		case weaker:
			permits.add(permit(r.Args), v)
		default:
			denials.add(denial(r.Args), v)
		}
	}
	switch {
	case !permits.some && (!denials.some || denials.verdict.compare(rest) == 0):
		return always(rest)
	case !denials.some:
		return decision{permits.when.simple(), permits.verdict, rest}
	}
	allowed, _ := denials.when.not()
	if !permits.some {
		return decision{allowed, rest, denials.verdict}
	}
	allowed, _ = permits.when.simple().and(allowed)
	return decision{allowed, permits.verdict, stricter(denials.verdict, rest)}
}

// conditions are those of several rules, with the strictest verdict of these.
type conditions struct {
	some bool
	when alternatives
	verdict
}

func (c *conditions) add(when alternatives, v verdict) {
	if c.some {
		v = stricter(c.verdict, v)
	}
	c.some, c.when, c.verdict = true, append(c.when, when...), v
}

// rule is an action for calls that meet a condition.
type rule struct {
	verdict
	when conjunction
}

func (r rule) key() string {
	return fmt.Sprintf("%s %d %s", r.action, r.errno, r.when.key())
}

func (r rule) args() []specs.LinuxSeccompArg { return slices.Clone([]specs.LinuxSeccompArg(r.when)) }

// under returns the rules that make the decision in a filter with a default action, which may make
// it stricter. All of them have one action.
func (d decision) under(fallback verdict) []rule {
	same := func(v verdict) bool { return v.action == fallback.action && v.errno == fallback.errno }
	only := func(v verdict) []rule {
		if same(v) {
			return nil
		}
		return []rule{{verdict: v}}
	}
	switch {
	case len(d.when) == 0:
		return only(d.other)
	case slices.ContainsFunc(d.when, func(c conjunction) bool { return len(c) == 0 }):
		return only(d.then)
	case d.then.compare(d.other) == 0:
		return only(d.other)
	case fallback.compare(d.other) >= 0:
		return rules(d.then, d.when)
	}
	forbidden, exact := d.when.not()
	if !exact || fallback.compare(d.then) < 0 {
		return only(d.other)
	}
	return rules(d.other, forbidden)
}

func rules(v verdict, when alternatives) (all []rule) {
	for _, c := range when {
		all = append(all, rule{v, c})
	}
	return all
}

func multiplexes(a specs.Arch) bool {
	return slices.Contains([]specs.Arch{
		specs.ArchX86, specs.ArchS390, specs.ArchS390X, specs.ArchMIPS, specs.ArchMIPSEL,
		specs.ArchPPC, specs.ArchPPC64, specs.ArchPPC64LE, specs.ArchPARISC, specs.ArchPARISC64,
	}, a)
}

// multiplexers are the system calls that do the work of others on some architectures, by those.
var multiplexers = func() map[string]string {
	whole := map[string]string{}
	for _, part := range []string{
		"accept", "accept4", "bind", "connect", "getpeername", "getsockname", "getsockopt", "listen", "recv", "recvfrom",
		"recvmmsg", "recvmsg", "send", "sendmmsg", "sendmsg", "sendto", "setsockopt", "shutdown", "socket", "socketpair",
	} {
		whole[part] = "socketcall"
	}
	for _, part := range []string{
		"msgctl", "msgget", "msgrcv", "msgsnd", "semctl", "semget", "semop", "semtimedop", "shmat", "shmctl", "shmdt", "shmget",
	} {
		whole[part] = "ipc"
	}
	return whole
}()
