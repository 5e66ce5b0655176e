package main

import "testing"

// The same sequences each time; `make fuzz-cri` runs others, any number.
func TestRandomCalls(t *testing.T) {
	t.Parallel()
	c := campaign{count: 2, turns: 30, seed: 1, out: t.Output()}
	if err := c.run(t.Context()); err != nil {
		t.Fatal(err)
	}
}
