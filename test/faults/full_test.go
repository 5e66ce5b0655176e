package faults

import "os"

// many returns the number of repetitions: few in a run of all tests, and as
// many as the claim needs if the environment has FULL=1.
func many(few, full int) int {
	if os.Getenv("FULL") != "" {
		return full
	}
	return few
}
