package main

import (
	"os"
	"testing"
	"time"

	"github.com/crius-run/crius/test/scene"
)

// A few cases of the matrix, different ones each time. `make crash` runs them
// all.
func TestSampleOfTheMatrix(t *testing.T) {
	t.Parallel()
	m := matrix{count: 28, workers: 2, seed: uint64(time.Now().UnixNano()), out: t.Output()}
	if err := m.run(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Many short-lived containers; `make crash-random` runs any number.
func TestServersKilledAtRandom(t *testing.T) {
	t.Parallel()
	c := crowd{count: 150, seed: uint64(time.Now().UnixNano()), out: t.Output()}
	if err := c.run(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// A container that counts as running has installed its signal handlers: it ends
// with code 2 if a stop signal comes sooner.
func TestContainersRunBeforeTheyAreDisturbed(t *testing.T) {
	t.Parallel()
	p, err := build(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	w, err := newWorld(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := w.close(); err != nil {
			t.Error(err)
		}
	}()
	s := w.stage(scene.Handlers[0])
	s.container.Args = scene.Steps("sleep 1s ; lines 1000000000 50ms")
	if err := s.running(t.Context()); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(s.logFile()); err != nil || info.Size() == 0 {
		t.Errorf("it runs, and has said nothing yet: %v", err)
	}
	if err := s.do(t.Context(), (*stage).stop, (*stage).wantStopped); err != nil {
		t.Error(err)
	}
}
