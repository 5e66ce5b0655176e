package main

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Every package in the import graph costs private memory in a process that runs once per
// container (see package wire): an addition to this list must be worth its cost.
func TestImports(t *testing.T) {
	t.Parallel()
	allowed := []string{
		"cmp", "errors", "iter", "math/bits", "runtime", "slices", "strconv", "sync", "sync/atomic", "syscall", "unicode/utf8", "unsafe",
		"github.com/crius-run/crius/cmd/crius-conmon", "github.com/crius-run/crius/conmon/monitor", "github.com/crius-run/crius/conmon/rest", "github.com/crius-run/crius/conmon/wire",
	}
	list := exec.Command("go", "list", "-deps", ".")
	list.Env = append(list.Environ(), "CGO_ENABLED=0")
	text, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	packages := strings.Fields(string(text))
	if len(packages) < 10 {
		t.Fatalf("only %q", packages)
	}
	for _, pkg := range packages {
		inside := strings.HasPrefix(pkg, "internal/") || strings.Contains(pkg, "/internal/") && !strings.Contains(pkg, ".")
		if !inside && !slices.Contains(allowed, pkg) {
			t.Errorf("%s is linked", pkg)
		}
	}
}

// A program started by hand says what it is for and exits.
func TestByHand(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "crius-conmon")
	if text, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	for _, args := range [][]string{nil, {"--help"}, {"--id=x", "--", "true"}} {
		run := exec.Command(program, args...)
		text, err := run.CombinedOutput()
		if run.ProcessState.ExitCode() != 2 || !strings.Contains(string(text), "nternal helper of crius") {
			t.Errorf("%q: %v: %s", args, err, text)
		}
	}
}
