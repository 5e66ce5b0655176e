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

// mostCPUs is more than any kernel is built for (CONFIG_NR_CPUS). A list names ranges, so
// that a short one could name more CPUs than fit into memory.
const mostCPUs = 1 << 14

// ParseSet reads a list of the kernel's, such as 0-3,7; an empty one is an empty set.
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

// String is the list that ParseSet reads.
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

// MarshalText makes a Set its list in records.
func (s Set) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads what MarshalText has written.
func (s *Set) UnmarshalText(text []byte) (err error) {
	*s, err = ParseSet(string(text))
	return err
}
