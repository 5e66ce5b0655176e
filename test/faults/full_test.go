package faults

import "os"

// many is how often something is tried: a few times in a run of all tests, and
// as often as a claim about all of them needs if the environment has FULL=1.
func many(few, full int) int {
	if os.Getenv("FULL") != "" {
		return full
	}
	return few
}
