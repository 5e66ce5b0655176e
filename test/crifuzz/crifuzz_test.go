package main

import "testing"

// The same sequences each time; `make fuzz-cri` has others, as many as you like.
func TestRandomCalls(t *testing.T) {
	t.Parallel()
	c := campaign{count: 2, turns: 30, seed: 1, out: t.Output()}
	if err := c.run(t.Context()); err != nil {
		t.Fatal(err)
	}
}
