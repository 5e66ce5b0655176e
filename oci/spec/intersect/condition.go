package intersect

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// conjunction is conditions that all must be met, each about another argument, sorted by argument.
// An empty one is always met.
type conjunction []specs.LinuxSeccompArg

// alternatives are conjunctions of which one must be met. An empty list never is.
type alternatives []conjunction

// mostAlternatives bounds the rules for one system call.
const mostAlternatives = 64

// permit returns the condition under which the arguments of a rule permit: none if the runtimes do
// not agree on it. If an argument has several conditions, some take one of them for enough.
func permit(args []specs.LinuxSeccompArg) alternatives {
	c := conjunction{}
	for _, arg := range args {
		arg, clear := normal(arg)
		if !clear || slices.ContainsFunc(c, func(other specs.LinuxSeccompArg) bool { return other.Index == arg.Index }) {
			return nil
		}
		c = append(c, arg)
	}
	return alternatives{c.sorted()}
}

// denial returns the condition under which the arguments of a rule deny: all that one of the
// runtimes may take it for.
func denial(args []specs.LinuxSeccompArg) alternatives {
	if one := permit(args); one != nil {
		return one
	}
	var each alternatives
	for _, arg := range args {
		arg, _ := normal(arg)
		each = append(each, conjunction{arg})
	}
	return each
}

// normal returns a condition without what has no meaning. It is not clear if a masked value has
// bits outside the mask.
func normal(arg specs.LinuxSeccompArg) (_ specs.LinuxSeccompArg, clear bool) {
	if arg.Op != specs.OpMaskedEqual {
		arg.ValueTwo = 0
		return arg, true
	}
	clear = arg.ValueTwo&^arg.Value == 0
	arg.ValueTwo &= arg.Value
	return arg, clear
}

func (c conjunction) sorted() conjunction {
	slices.SortFunc(c, func(a, b specs.LinuxSeccompArg) int { return int(a.Index) - int(b.Index) })
	return c
}

func (c conjunction) key() string {
	var b strings.Builder
	for _, arg := range c {
		fmt.Fprintf(&b, "%d %s %d %d;", arg.Index, arg.Op, arg.Value, arg.ValueTwo)
	}
	return b.String()
}

// within reports whether all calls that meet c meet d, as far as that is obvious.
func (c conjunction) within(d conjunction) bool {
	return !slices.ContainsFunc(d, func(arg specs.LinuxSeccompArg) bool { return !slices.Contains(c, arg) })
}

// simple returns the alternatives without those that are within others. Too many are none.
func (a alternatives) simple() alternatives {
	var kept alternatives
	for i, c := range a {
		redundant := slices.ContainsFunc(kept, c.within) ||
			slices.ContainsFunc(a[i+1:], func(d conjunction) bool { return c.within(d) && !d.within(c) })
		if !redundant {
			kept = append(kept, c)
		}
		if len(kept) > mostAlternatives {
			return nil
		}
	}
	return kept
}

// and returns the alternatives of calls that meet both. It is not exact if it leaves some out that
// a filter cannot describe.
func (a alternatives) and(b alternatives) (both alternatives, exact bool) {
	exact = true
	for _, c := range a {
		for _, d := range b {
			joined, whole := c.and(d)
			both, exact = append(both, joined...), exact && whole
		}
		if len(both) > mostAlternatives {
			if both = both.simple(); both == nil {
				return nil, false
			}
		}
	}
	kept := both.simple()
	return kept, exact && (len(kept) > 0 || len(both) == 0)
}

// not returns the alternatives of calls that meet none of a, like and.
func (a alternatives) not() (_ alternatives, exact bool) {
	rest, exact := alternatives{nil}, true
	for _, c := range a {
		var opposite alternatives
		for _, arg := range c {
			all, whole := negate(arg)
			opposite, exact = append(opposite, all...), exact && whole
		}
		var precise bool
		rest, precise = rest.and(opposite)
		exact = exact && precise
	}
	return rest, exact
}

// and joins two conjunctions.
func (c conjunction) and(d conjunction) (all alternatives, exact bool) {
	all, exact = alternatives{slices.Clone(c)}, true
	for _, arg := range d {
		var next alternatives
		for _, joined := range all {
			i := slices.IndexFunc(joined, func(other specs.LinuxSeccompArg) bool { return other.Index == arg.Index })
			if i < 0 {
				next = append(next, append(joined, arg))
				continue
			}
			ones, whole := both(joined[i], arg)
			for _, one := range ones {
				next = append(next, slices.Replace(slices.Clone(joined), i, i+1, one))
			}
			exact = exact && whole
		}
		if all = next; len(all) > mostAlternatives {
			return nil, false
		}
	}
	for _, joined := range all {
		joined.sorted()
	}
	return all, exact
}

// both joins two conditions about the same argument, to alternatives. Filters of 32-bit
// architectures see the lower half of arguments and values only, and it must hold for them as well.
func both(a, b specs.LinuxSeccompArg) (all []specs.LinuxSeccompArg, exact bool) {
	if b.Op == specs.OpEqualTo {
		a, b = b, a
	}
	switch {
	case a == b:
		all, exact = append(all, a), true
	case a.Op == specs.OpEqualTo:
		whole, half := holds(b, a.Value), holds(lower(b), lower(a).Value)
		if exact = whole == half; whole && half {
			all = append(all, a)
		}
	case a.Op == specs.OpMaskedEqual && b.Op == specs.OpMaskedEqual:
		differ := (a.ValueTwo ^ b.ValueTwo) & a.Value & b.Value
		a.Value, a.ValueTwo = a.Value|b.Value, a.ValueTwo|b.ValueTwo
		if exact = (differ == 0) == (differ&math.MaxUint32 == 0); differ == 0 {
			all = append(all, a)
		}
	case b.Op == specs.OpMaskedEqual:
		for _, block := range blocks(rangesOf(a), a.Index) {
			joined, _ := both(block, b)
			all = append(all, joined...)
		}
	case a.Op == specs.OpMaskedEqual:
		return both(b, a)
	default:
		all = blocks(common(rangesOf(a), rangesOf(b)), a.Index)
	}
	return all, exact
}

// interval is a range of values below 1<<32. To is not in it.
type interval struct{ from, to uint64 }

// rangesOf returns the values below 1<<32 that meet a condition other than equality and a mask; none
// if 32-bit architectures see it as another condition.
func rangesOf(arg specs.LinuxSeccompArg) []interval {
	const end = 1 << 32
	if arg.Value >= end {
		return nil
	}
	switch arg.Op {
	case specs.OpLessThan:
		return []interval{{0, arg.Value}}
	case specs.OpLessEqual:
		return []interval{{0, arg.Value + 1}}
	case specs.OpGreaterEqual:
		return []interval{{arg.Value, end}}
	case specs.OpGreaterThan:
		return []interval{{arg.Value + 1, end}}
	}
	return []interval{{0, arg.Value}, {arg.Value + 1, end}} // OpNotEqual
}

func common(some, others []interval) (all []interval) {
	for _, a := range some {
		for _, b := range others {
			all = append(all, interval{max(a.from, b.from), min(a.to, b.to)})
		}
	}
	return all
}

// blocks returns the masks that together are met by the values of ranges: blocks whose sizes are
// powers of two.
func blocks(ranges []interval, index uint) (all []specs.LinuxSeccompArg) {
	for _, r := range ranges {
		for r.from < r.to {
			size := uint64(1) << (bits.Len64(r.to-r.from) - 1)
			if r.from > 0 {
				size = min(size, r.from&-r.from)
			}
			all = append(all, specs.LinuxSeccompArg{Index: index, Op: specs.OpMaskedEqual, Value: -size, ValueTwo: r.from})
			r.from += size
		}
	}
	return all
}

// lower returns a condition as a 32-bit architecture sees it.
func lower(arg specs.LinuxSeccompArg) specs.LinuxSeccompArg {
	arg.Value &= math.MaxUint32
	arg.ValueTwo &= math.MaxUint32
	return arg
}

// holds reports whether an argument meets a condition.
func holds(arg specs.LinuxSeccompArg, value uint64) bool {
	switch arg.Op {
	case specs.OpNotEqual:
		return value != arg.Value
	case specs.OpLessThan:
		return value < arg.Value
	case specs.OpLessEqual:
		return value <= arg.Value
	case specs.OpEqualTo:
		return value == arg.Value
	case specs.OpGreaterEqual:
		return value >= arg.Value
	case specs.OpGreaterThan:
		return value > arg.Value
	}
	return value&arg.Value == arg.ValueTwo // OpMaskedEqual
}

var opposites = map[specs.LinuxSeccompOperator]specs.LinuxSeccompOperator{
	specs.OpNotEqual: specs.OpEqualTo, specs.OpEqualTo: specs.OpNotEqual,
	specs.OpLessThan: specs.OpGreaterEqual, specs.OpGreaterEqual: specs.OpLessThan,
	specs.OpLessEqual: specs.OpGreaterThan, specs.OpGreaterThan: specs.OpLessEqual,
}

// negate returns the alternatives to a condition. That to a mask is another value of one of its
// bits; those in the upper half are left out, since 32-bit architectures do not see them.
func negate(arg specs.LinuxSeccompArg) (all alternatives, exact bool) {
	if op, ok := opposites[arg.Op]; ok {
		arg.Op = op
		return alternatives{{arg}}, true
	}
	for bit := uint64(1); bit <= math.MaxUint32; bit <<= 1 {
		if arg.Value&bit != 0 {
			all = append(all, conjunction{{Index: arg.Index, Op: specs.OpMaskedEqual, Value: bit, ValueTwo: ^arg.ValueTwo & bit}})
		}
	}
	return all, arg.Value <= math.MaxUint32
}
