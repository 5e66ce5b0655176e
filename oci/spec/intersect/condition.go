package intersect

import (
	"fmt"
	"math"
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
			joined, possible, expressible := c.and(d)
			if expressible && possible {
				both = append(both, joined)
			}
			exact = exact && expressible
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

// and joins two conjunctions. No call can meet both if it is not possible.
func (c conjunction) and(d conjunction) (joined conjunction, possible, expressible bool) {
	joined = slices.Clone(c)
	for _, arg := range d {
		i := slices.IndexFunc(joined, func(other specs.LinuxSeccompArg) bool { return other.Index == arg.Index })
		if i < 0 {
			joined = append(joined, arg)
			continue
		}
		one, possible, expressible := both(joined[i], arg)
		if !possible || !expressible {
			return nil, possible, expressible
		}
		joined[i] = one
	}
	return joined.sorted(), true, true
}

// both joins two conditions about the same argument into one. Filters of 32-bit architectures see
// the lower half of arguments and values only, and it must hold for them as well.
func both(a, b specs.LinuxSeccompArg) (one specs.LinuxSeccompArg, possible, expressible bool) {
	if b.Op == specs.OpEqualTo {
		a, b = b, a
	}
	switch {
	case a == b:
		return a, true, true
	case a.Op == specs.OpEqualTo:
		whole, half := holds(b, a.Value), holds(lower(b), lower(a).Value)
		return a, whole, whole == half
	case a.Op == specs.OpMaskedEqual && b.Op == specs.OpMaskedEqual:
		differ := (a.ValueTwo ^ b.ValueTwo) & a.Value & b.Value
		a.Value, a.ValueTwo = a.Value|b.Value, a.ValueTwo|b.ValueTwo
		return a, differ == 0, (differ == 0) == (differ&math.MaxUint32 == 0)
	}
	return a, true, false
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
