package guarded_test

import (
	"fmt"

	"github.com/crius-run/crius/internal/guarded"
)

// State that several goroutines use is one struct: Now reads all of it, Change changes it in
// one step.
func ExampleValue() {
	type state struct {
		Phase string
		PID   int
	}
	var now guarded.Value[state]
	now.Change(func(s *state) { s.Phase, s.PID = "started", 17 })
	fmt.Printf("%+v\n", now.Now())
	// Output: {Phase:started PID:17}
}
