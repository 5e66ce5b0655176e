package main

import (
	"testing"
	"time"
)

// A few cases of the matrix, others each time. `make crash` has them all.
func TestSampleOfTheMatrix(t *testing.T) {
	t.Parallel()
	m := matrix{count: 28, workers: 2, seed: uint64(time.Now().UnixNano()), out: t.Output()}
	if err := m.run(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Many containers that live for a moment; `make crash-random` has as
// many as you like.
func TestServersKilledAtRandom(t *testing.T) {
	t.Parallel()
	c := crowd{count: 150, seed: uint64(time.Now().UnixNano()), out: t.Output()}
	if err := c.run(t.Context()); err != nil {
		t.Fatal(err)
	}
}
