package intersect

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// call is a system call with arguments.
type call struct {
	name string
	args [6]uint64
}

// reading is one of the ways in which runtimes understand a filter.
type reading struct {
	strictest bool // of the rules that match; else the first one for all arguments, or the first
	anyOf     bool // several conditions on one argument are alternatives
	half      bool // of a 32-bit architecture
}

func readings() (all []reading) {
	for i := range 8 {
		all = append(all, reading{i&1 != 0, i&2 != 0, i&4 != 0})
	}
	return all
}

// verdict returns what a filter does with a call.
func (r reading) verdict(f *specs.LinuxSeccomp, c call) verdict {
	var matching, certain []verdict
	for _, s := range f.Syscalls {
		if !slices.Contains(s.Names, c.name) || !r.matches(s.Args, c) {
			continue
		}
		v := verdictOf(s.Action, s.ErrnoRet, true)
		matching = append(matching, v)
		if len(s.Args) == 0 {
			certain = append(certain, v)
		}
	}
	fallback := verdictOf(f.DefaultAction, f.DefaultErrnoRet, false)
	switch {
	case len(matching) == 0:
		return fallback
	case r.strictest:
		return slices.MaxFunc(matching, verdict.compare)
	case len(certain) > 0:
		return certain[0]
	}
	return matching[0]
}

func (r reading) matches(args []specs.LinuxSeccompArg, c call) bool {
	seen, repeated := map[uint]bool{}, false
	for _, arg := range args {
		repeated = repeated || seen[arg.Index]
		seen[arg.Index] = true
	}
	met := func(arg specs.LinuxSeccompArg) bool {
		value := c.args[arg.Index]
		if r.half {
			arg, value = lower(arg), value&(1<<32-1)
		}
		return holds(arg, value)
	}
	if r.anyOf && repeated {
		return slices.ContainsFunc(args, met)
	}
	return !slices.ContainsFunc(args, func(arg specs.LinuxSeccompArg) bool { return !met(arg) })
}

// values are those of which arguments and conditions are made: few, so that they meet, and some that
// differ in one half only.
var values = []uint64{0, 1, 2, 3, 7, 0x10, 1 << 32, 1<<32 | 1, 1<<63 | 2, ^uint64(0)}

var (
	allActions = []specs.LinuxSeccompAction{
		specs.ActAllow, specs.ActAllow, specs.ActErrno, specs.ActErrno, specs.ActLog, specs.ActTrace, specs.ActNotify,
		specs.ActTrap, specs.ActKill, specs.ActKillThread, specs.ActKillProcess,
	}
	allOperators = []specs.LinuxSeccompOperator{
		specs.OpNotEqual, specs.OpLessThan, specs.OpLessEqual, specs.OpEqualTo, specs.OpGreaterEqual, specs.OpGreaterThan, specs.OpMaskedEqual, specs.OpMaskedEqual,
	}
	allNames = []string{"read", "clone", "personality", "socket", "socketcall", "semop", "ipc"}
)

func pick[T any](random *rand.Rand, from []T) T { return from[random.IntN(len(from))] }

func randomFilter(random *rand.Rand) *specs.LinuxSeccomp {
	errno := func() *uint {
		if random.IntN(2) == 0 {
			return nil
		}
		n := uint(random.IntN(3))
		return &n
	}
	f := &specs.LinuxSeccomp{DefaultAction: pick(random, allActions), DefaultErrnoRet: errno()}
	for range random.IntN(8) {
		s := specs.LinuxSyscall{Names: []string{pick(random, allNames)}, Action: pick(random, allActions), ErrnoRet: errno()}
		if random.IntN(3) == 0 {
			s.Names = append(s.Names, pick(random, allNames))
		}
		for range max(0, random.IntN(5)-1) {
			s.Args = append(s.Args, specs.LinuxSeccompArg{
				Index: uint(random.IntN(3)), Value: pick(random, values), ValueTwo: pick(random, values), Op: pick(random, allOperators),
			})
		}
		f.Syscalls = append(f.Syscalls, s)
	}
	return f
}

func calls(random *rand.Rand) (all []call) {
	for _, name := range append([]string{"unheard"}, allNames...) {
		for range 40 {
			all = append(all, call{name, [6]uint64{pick(random, values), pick(random, values), pick(random, values)}})
		}
	}
	return all
}

// The intersection is never weaker than either filter, however the runtimes read those.
func TestNeverWeaker(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	for range 1500 {
		a, b := randomFilter(random), randomFilter(random)
		merged := Of(a, b, specs.ArchX86_64)
		for _, c := range calls(random) {
			for _, r := range readings() {
				got := r.verdict(merged, c)
				for _, f := range []*specs.LinuxSeccomp{a, b} {
					if want := r.verdict(f, c); got.compare(want) < 0 {
						t.Fatalf("seed %d: %s%x, read as %+v: %s, weaker than %s\n%s\n%s\n%s", seed, c.name, c.args, r, got.action, want.action, shown(a), shown(b), shown(merged))
					}
				}
			}
		}
	}
}

// It means the same in all readings: one action beside the default one for each call, and no
// argument twice in a rule.
func TestResultIsUnambiguous(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	for range 1500 {
		a, b := randomFilter(random), randomFilter(random)
		merged := Of(a, b, specs.ArchX86_64)
		found := map[string]specs.LinuxSyscall{}
		for _, s := range merged.Syscalls {
			for _, name := range s.Names {
				other, ok := found[name]
				if ok && (other.Action != s.Action || len(other.Args) == 0 || len(s.Args) == 0) {
					t.Fatalf("seed %d: %s has two rules\n%s", seed, name, shown(merged))
				}
				found[name] = s
			}
			for i, arg := range s.Args {
				if i > 0 && arg.Index <= s.Args[i-1].Index {
					t.Fatalf("seed %d: an argument occurs twice\n%s", seed, shown(merged))
				}
			}
		}
	}
}

// For filters with one condition for each call, none of them on the same argument, nothing is
// denied that both permit.
func TestExactWherePossible(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	simple := func(index uint) *specs.LinuxSeccomp {
		f := &specs.LinuxSeccomp{DefaultAction: specs.ActErrno}
		other := specs.ActAllow
		if random.IntN(2) == 0 {
			f.DefaultAction, other = other, f.DefaultAction
		}
		for _, name := range []string{"read", "clone", "personality"} {
			s := specs.LinuxSyscall{Names: []string{name}, Action: other}
			mask := pick(random, values) & 0xff
			switch random.IntN(4) {
			case 0:
				continue
			case 1:
				s.Args = []specs.LinuxSeccompArg{{Index: index, Op: specs.OpMaskedEqual, Value: mask, ValueTwo: pick(random, values) & mask}}
			case 2:
				s.Args = []specs.LinuxSeccompArg{{Index: index, Op: pick(random, allOperators[:6]), Value: mask}}
			}
			f.Syscalls = append(f.Syscalls, s)
		}
		return f
	}
	for range 1500 {
		a, b := simple(0), simple(1)
		merged := Of(a, b, specs.ArchX86_64)
		for _, c := range calls(random) {
			r := readings()[0]
			if got, want := r.verdict(merged, c), stricter(r.verdict(a, c), r.verdict(b, c)); got.compare(want) != 0 {
				t.Fatalf("seed %d: %s%x: %s, want %s\n%s\n%s\n%s", seed, c.name, c.args, got.action, want.action, shown(a), shown(b), shown(merged))
			}
		}
	}
}

func shown(f *specs.LinuxSeccomp) string {
	text, err := json.Marshal(f)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func filterOf(t *testing.T, text string) *specs.LinuxSeccomp {
	t.Helper()
	f := &specs.LinuxSeccomp{}
	if err := json.Unmarshal([]byte(text), f); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestIntersection(t *testing.T) {
	t.Parallel()
	rule := func(names, action, rest string) string {
		return fmt.Sprintf(`{"names":[%s],"action":"SCMP_ACT_%s"%s}`, names, action, rest)
	}
	filter := func(action, rest string, rules ...string) string {
		text := `{"defaultAction":"SCMP_ACT_` + action + `"` + rest
		for i, r := range rules {
			text += map[bool]string{true: `,"syscalls":[`, false: ","}[i == 0] + r
		}
		if len(rules) > 0 {
			text += "]"
		}
		return text + "}"
	}
	const native, eperm, enosys = `,"architectures":["SCMP_ARCH_X86_64"]`, `,"errnoRet":1`, `,"errnoRet":38`
	condition := func(op string, value, two int) string {
		text := fmt.Sprintf(`,"args":[{"index":0,"value":%d,"op":"SCMP_CMP_%s"}]`, value, op)
		if two > 0 {
			text = fmt.Sprintf(`,"args":[{"index":0,"value":%d,"valueTwo":%d,"op":"SCMP_CMP_%s"}]`, value, two, op)
		}
		return text
	}
	masked := func(name string, mask, value uint64) string {
		return rule(`"`+name+`"`, "ALLOW", fmt.Sprintf(`,"args":[{"index":0,"value":%d,"valueTwo":%d,"op":"SCMP_CMP_MASKED_EQ"}]`, mask, value))
	}
	for name, c := range map[string]struct{ first, second, want string }{
		"what both allow": {
			filter("ERRNO", "", rule(`"read","write"`, "ALLOW", "")),
			filter("ERRNO", "", rule(`"read"`, "ALLOW", ""), rule(`"open"`, "ALLOW", "")),
			filter("ERRNO", `,"defaultErrnoRet":1`+native, rule(`"read"`, "ALLOW", "")),
		},
		"what one forbids": {
			filter("ALLOW", "", rule(`"mkdir"`, "KILL_PROCESS", "")),
			filter("ALLOW", "", rule(`"mkdir","rmdir"`, "ERRNO", "")),
			filter("ALLOW", native, rule(`"rmdir"`, "ERRNO", eperm), rule(`"mkdir"`, "KILL_PROCESS", "")),
		},
		"the error of a rule, not of a default": {
			filter("ERRNO", "", rule(`"read"`, "ALLOW", "")),
			filter("ALLOW", "", rule(`"clone3"`, "ERRNO", enosys)),
			filter("ERRNO", `,"defaultErrnoRet":1`+native, rule(`"read"`, "ALLOW", ""), rule(`"clone3"`, "ERRNO", enosys)),
		},
		"an allowed value and a forbidden one": {
			filter("ERRNO", "", rule(`"personality"`, "ALLOW", condition("EQ", 8, 0)), rule(`"personality"`, "ALLOW", condition("EQ", 9, 0))),
			filter("ALLOW", "", rule(`"personality"`, "ERRNO", condition("EQ", 9, 0))),
			filter("ERRNO", `,"defaultErrnoRet":1`+native, rule(`"personality"`, "ALLOW", condition("EQ", 8, 0))),
		},
		"a part of a mask": {
			filter("ALLOW", "", rule(`"clone"`, "ERRNO", condition("MASKED_EQ", 1, 1))),
			filter("ERRNO", "", rule(`"clone"`, "ALLOW", condition("MASKED_EQ", 6, 0))),
			filter("ERRNO", `,"defaultErrnoRet":1`+native, rule(`"clone"`, "ALLOW", condition("MASKED_EQ", 7, 0))),
		},
		"a range, in blocks": {
			filter("ERRNO", "", rule(`"read"`, "ALLOW", condition("GE", 2, 0))),
			filter("ERRNO", "", rule(`"read"`, "ALLOW", condition("LT", 9, 0))),
			filter("ERRNO", `,"defaultErrnoRet":1`+native, masked("read", 1<<64-4, 4), masked("read", 1<<64-2, 2), masked("read", 1<<64-1, 8)),
		},
		"what cannot be said is denied": {
			filter("ERRNO", "", rule(`"read"`, "ALLOW", condition("GE", 2, 0))),
			filter("ERRNO", "", rule(`"read"`, "ALLOW", condition("LE", 1<<33, 0))),
			filter("ERRNO", `,"defaultErrnoRet":1`+native),
		},
		"denials of arguments": {
			filter("ALLOW", "", rule(`"clone"`, "ERRNO", condition("MASKED_EQ", 6, 6)+eperm)),
			filter("LOG", ""),
			filter("LOG", native, rule(`"clone"`, "ERRNO", eperm+condition("MASKED_EQ", 6, 6))),
		},
		"architectures and flags": {
			filter("ALLOW", `,"architectures":["SCMP_ARCH_X86","SCMP_ARCH_ARM"],"flags":["SECCOMP_FILTER_FLAG_SPEC_ALLOW","SECCOMP_FILTER_FLAG_LOG"]`),
			filter("ALLOW", `,"architectures":["SCMP_ARCH_X86_64","SCMP_ARCH_X86","SCMP_ARCH_X32"],"flags":["SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"]`),
			filter("ALLOW", `,"architectures":["SCMP_ARCH_X86_64","SCMP_ARCH_X86"],"flags":["SECCOMP_FILTER_FLAG_LOG"]`),
		},
		"the listener of the node": {
			filter("ALLOW", ""),
			filter("ALLOW", `,"listenerPath":"/run/l.sock","listenerMetadata":"m","flags":["SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"]`, rule(`"mount"`, "NOTIFY", "")),
			filter("ALLOW", native+`,"flags":["SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"],"listenerPath":"/run/l.sock","listenerMetadata":"m"`, rule(`"mount"`, "NOTIFY", "")),
		},
		"a listener that has nothing to hear": {
			filter("ALLOW", "", rule(`"mount"`, "ERRNO", eperm)),
			filter("ALLOW", `,"listenerPath":"/run/l.sock"`, rule(`"mount"`, "NOTIFY", "")),
			filter("ALLOW", native, rule(`"mount"`, "ERRNO", eperm)),
		},
		"a socket by way of socketcall": {
			filter("ALLOW", `,"architectures":["SCMP_ARCH_X86"]`, rule(`"socket"`, "ERRNO", eperm)),
			filter("ERRNO", `,"architectures":["SCMP_ARCH_X86"]`, rule(`"socket","socketcall","read"`, "ALLOW", "")),
			filter("ERRNO", `,"defaultErrnoRet":1,"architectures":["SCMP_ARCH_X86_64","SCMP_ARCH_X86"]`, rule(`"read"`, "ALLOW", "")),
		},
	} {
		got := Of(filterOf(t, c.first), filterOf(t, c.second), specs.ArchX86_64)
		if shown(got) != shown(filterOf(t, c.want)) {
			t.Errorf("%s:\n%s, want\n%s", name, shown(got), c.want)
		}
	}
}

// Blocks are met by the values below 1<<32 that meet the condition, and by no others.
func TestBlocks(t *testing.T) {
	t.Parallel()
	some := []uint64{0, 1, 2, 5, 6, 7, 8, 9, 63, 64, 1<<31 - 1, 1 << 31, 1<<32 - 2, 1<<32 - 1, 1 << 32, 1<<32 + 6, ^uint64(0)}
	for _, op := range allOperators[:6] {
		if op == specs.OpEqualTo {
			continue
		}
		for _, limit := range some {
			arg := specs.LinuxSeccompArg{Op: op, Value: limit}
			all := blocks(rangesOf(arg), 0)
			if len(all) > 64 {
				t.Errorf("%s %d: %d blocks", op, limit, len(all))
			}
			for _, value := range some {
				met := slices.ContainsFunc(all, func(b specs.LinuxSeccompArg) bool { return holds(b, value) })
				if want := holds(arg, value) && value < 1<<32 && limit < 1<<32; met != want {
					t.Errorf("%d %s %d: %t, want %t", value, op, limit, met, want)
				}
			}
		}
	}
}

// A multiplexer is as strict as its parts on an architecture that has it, and the other way round.
func TestMultiplexers(t *testing.T) {
	t.Parallel()
	allow := filterOf(t, `{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86"]}`)
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	has := func(f *specs.LinuxSeccomp, name string) bool {
		return slices.ContainsFunc(f.Syscalls, func(s specs.LinuxSyscall) bool { return slices.Contains(s.Names, name) })
	}
	for range 500 {
		f := randomFilter(random)
		f.Architectures = []specs.Arch{specs.ArchX86}
		merged := Of(f, allow, specs.ArchX86_64)
		for _, c := range calls(random) {
			whole := multiplexers[c.name]
			if whole == "" || !has(f, whole) || !has(merged, c.name) {
				continue
			}
			r := readings()[1]
			direct, through := r.verdict(merged, c), r.verdict(f, call{whole, c.args})
			if direct.compare(through) < 0 {
				t.Fatalf("seed %d: %s%x is %s, but %s is %s\n%s\n%s", seed, c.name, c.args, direct.action, whole, through.action, shown(f), shown(merged))
			}
		}
	}
}

// Sockets of moby's profile (families below 38, 39, and above 40) stay usable in masks of families,
// as crius's profile has them, and 38 and 40 do not.
func TestRangesAndMasksOfFamilies_moby_52494(t *testing.T) {
	t.Parallel()
	ranges := filterOf(t, `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[
		{"names":["socket"],"action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":38,"op":"SCMP_CMP_LT"}]},
		{"names":["socket"],"action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":39,"op":"SCMP_CMP_EQ"}]},
		{"names":["socket"],"action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":40,"op":"SCMP_CMP_GT"}]}]}`)
	masks := &specs.LinuxSeccomp{DefaultAction: specs.ActErrno}
	for _, block := range [][2]uint64{{0, 32}, {32, 4}, {36, 2}, {39, 1}, {41, 1}, {42, 2}, {44, 4}} {
		masks.Syscalls = append(masks.Syscalls, specs.LinuxSyscall{Names: []string{"socket"}, Action: specs.ActAllow, Args: []specs.LinuxSeccompArg{
			{Op: specs.OpMaskedEqual, Value: 1<<32 - block[1], ValueTwo: block[0]},
		}})
	}
	for _, merged := range []*specs.LinuxSeccomp{Of(ranges, masks, specs.ArchX86_64), Of(masks, ranges, specs.ArchX86_64)} {
		for family := range uint64(64) {
			want := specs.ActAllow
			if family == 38 || family == 40 || family >= 48 {
				want = specs.ActErrno
			}
			for _, r := range readings() {
				if got := r.verdict(merged, call{"socket", [6]uint64{family}}); got.action != want {
					t.Errorf("family %d, read as %+v: %s, want %s", family, r, got.action, want)
				}
			}
		}
	}
}
