package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/tools"
)

// The page on handlers has a row for each spec that is known to fail, in the
// order of the list, and no other.
func TestKnownFailuresInTheManual(t *testing.T) {
	t.Parallel()
	manual, err := os.ReadFile("../../docs/handlers.md")
	if err != nil {
		t.Fatal(err)
	}
	const head = "| spec of critest | fails by | reason |\n|---|---|---|\n"
	_, rest, found := strings.Cut(string(manual), head)
	if !found {
		t.Fatalf("the page on handlers has no table that begins with %q", head)
	}
	table, _, _ := strings.Cut(rest, "\n\n")
	var want []string
	for _, k := range allKnownFailures {
		by := "both"
		if slices.Equal(k.handlers, gvisorShim) {
			by = "the shim"
		}
		want = append(want, fmt.Sprintf("| %s | %s | %s |", k.spec, by, k.why))
	}
	if rows := strings.Split(table, "\n"); !slices.Equal(rows, want) {
		t.Errorf("the table of the page is\n%s\nwant\n%s", table, strings.Join(want, "\n"))
	}
}

func TestReasonsAreThoseOfTheHandler(t *testing.T) {
	t.Parallel()
	command, shim := knownFailures(tools.Gvisor), knownFailures(tools.GvisorShim)
	if len(command) == 0 || len(shim) != len(allKnownFailures) || len(command) >= len(shim) {
		t.Errorf("%d specs are known to fail by runsc, %d by its shim, of %d", len(command), len(shim), len(allKnownFailures))
	}
	for _, handler := range allHandlers() {
		if known := knownFailures(handler); len(known) > 0 {
			t.Errorf("specs are known to fail with %s: %q", handler, known)
		}
	}
}
