package unpack

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.podman.io/image/v5/docker/reference"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/race"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/unpack/wire"
	testprogram "github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/tools"
)

// Not parallel: it sets a variable of the environment.
func TestFindProgram(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	if path, err := FindProgram(); !errors.Is(err, fault.Precondition) {
		t.Errorf("%q, %v", path, err)
	}
	program := filepath.Join(dir, "crius-unpack")
	if err := os.WriteFile(program, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if path, err := FindProgram(); path != program || err != nil {
		t.Errorf("%q, %v", path, err)
	}
}

// The server starts the program that it has opened, whatever is in its place by now, and has
// an error for one that speaks another version of the protocol.
func TestProgramIsHeld(t *testing.T) {
	t.Parallel()
	built, err := tools.Unpacker(t.Context(), race.Enabled)
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(built)
	if err != nil {
		t.Fatal(err)
	}
	if err := CheckProgram(t.Context(), built); err != nil {
		t.Error(err)
	}
	// By hand, under the name by which a server starts it.
	byHand := exec.CommandContext(t.Context(), built)
	byHand.Args = []string{wire.Name}
	if said, err := byHand.CombinedOutput(); err == nil || !strings.HasPrefix(string(said), "usage: crius-unpack") {
		t.Errorf("by hand: %q, %v", said, err)
	}
	path := filepath.Join(t.TempDir(), "crius-unpack")
	if err := testprogram.Write(path, content); err != nil {
		t.Fatal(err)
	}
	program, err := OpenProgram(path)
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte("#!/bin/false\n"), 0o755)); err != nil {
		t.Fatal(err)
	}
	cmd, room := program.command(t.Context())
	defer room.Close()
	w := &process{Task: taskOf(t, program), cmd: cmd, room: room}
	last, err := w.carryOut(t.Context(), wire.Order{Protocol: wire.Protocol + 1})
	if !errors.Is(err, fault.Precondition) || last != (wire.Message{}) {
		t.Errorf("%+v, %v", last, err)
	}
}

// taskOf returns the task of an image about which nothing is known.
func taskOf(t *testing.T, program *Program) Task {
	t.Helper()
	name, err := reference.ParseNormalizedNamed("registry.example/app:1")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	job, err := os.Create(filepath.Join(dir, "job"))
	if err != nil {
		t.Fatal(err)
	}
	downloads := download.In(dir)
	t.Cleanup(func() {
		if err := errors.Join(job.Close(), downloads.Close()); err != nil {
			t.Error(err)
		}
	})
	return Task{Source: &source.Image{Name: name}, Job: job, Downloads: downloads.Begin("registry.example"), Program: program}
}
