package main

import (
	"testing"
	"time"
)

// Some sequences, others each time; `make fuzz-cri` has as many as you like.
func TestRandomCalls(t *testing.T) {
	t.Parallel()
	c := campaign{count: 2, turns: 30, seed: uint64(time.Now().UnixNano()), out: t.Output()}
	if err := c.run(t.Context()); err != nil {
		t.Fatal(err)
	}
}
