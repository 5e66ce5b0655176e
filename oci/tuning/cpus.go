package tuning

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/crius-run/crius/internal/fault"
)

// Set is a set of CPUs, in ascending order.
type Set []int

// mostCPUs is more than any kernel is built for (CONFIG_NR_CPUS). Because lists
// name ranges, a short list could name more CPUs than fit into memory.
const mostCPUs = 1 << 14

// ParseSet reads a list in the kernel's format, such as 0-3,7; an empty list is
// an empty set.
func ParseSet(list string) (Set, error) {
	var s Set
	list = strings.TrimSpace(list)
	if list == "" {
		return s, nil
	}
	for part := range strings.SplitSeq(list, ",") {
		low, high, isRange := strings.Cut(part, "-")
		first, err := strconv.ParseUint(low, 10, 31)
		last := first
		if err == nil && isRange {
			last, err = strconv.ParseUint(high, 10, 31)
		}
		if err != nil || first > last || last >= mostCPUs {
			return nil, fmt.Errorf("%.80q is not a list of CPUs such as 0-3,7: %w", list, fault.Invalid)
		}
		for cpu := first; cpu <= last; cpu++ {
			s = append(s, int(cpu))
		}
	}
	slices.Sort(s)
	return slices.Compact(s), nil
}

// parseMask reads a mask in the kernel's format, such as ff,ffffffff.
func parseMask(text string) (Set, error) {
	digits := strings.ReplaceAll(strings.TrimSpace(text), ",", "")
	if digits == "" || len(digits) > mostCPUs/4 {
		return nil, fmt.Errorf("%.80q is not a mask of CPUs", text)
	}
	var s Set
	for i := range len(digits) {
		nibble, err := strconv.ParseUint(digits[len(digits)-1-i:len(digits)-i], 16, 8)
		if err != nil {
			return nil, fmt.Errorf("%.80q is not a mask of CPUs", text)
		}
		for bit := range 4 {
			if nibble>>bit&1 == 1 {
				s = append(s, 4*i+bit)
			}
		}
	}
	return s, nil
}

// String returns the list that ParseSet reads.
func (s Set) String() string {
	var parts []string
	for i := 0; i < len(s); {
		end := i
		for end+1 < len(s) && s[end+1] == s[end]+1 {
			end++
		}
		part := strconv.Itoa(s[i])
		if end > i {
			part += "-" + strconv.Itoa(s[end])
		}
		parts = append(parts, part)
		i = end + 1
	}
	return strings.Join(parts, ",")
}

// mask returns the form that parseMask reads, without superfluous digits: the
// kernel refuses a mask that is longer than its own.
func (s Set) mask() string {
	words := []uint32{0}
	for _, cpu := range s {
		for len(words) <= cpu/32 {
			words = append(words, 0)
		}
		words[cpu/32] |= 1 << (cpu % 32)
	}
	text := strconv.FormatUint(uint64(words[len(words)-1]), 16)
	for i := len(words) - 2; i >= 0; i-- {
		text += fmt.Sprintf(",%08x", words[i])
	}
	return text
}

func (s Set) has(cpu int) bool {
	_, found := slices.BinarySearch(s, cpu)
	return found
}

// With returns the CPUs in either set.
func (s Set) With(other Set) Set { return s.plus(other) }

func (s Set) plus(other Set) Set {
	all := slices.Concat(s, other)
	slices.Sort(all)
	return slices.Compact(all)
}

func (s Set) minus(other Set) Set { return slices.DeleteFunc(slices.Clone(s), other.has) }

func (s Set) and(other Set) Set {
	return slices.DeleteFunc(slices.Clone(s), func(cpu int) bool { return !other.has(cpu) })
}

// MarshalText writes a Set as its list in records.
func (s Set) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads what MarshalText has written.
func (s *Set) UnmarshalText(text []byte) (err error) {
	*s, err = ParseSet(string(text))
	return err
}
