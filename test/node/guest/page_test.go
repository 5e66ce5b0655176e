package main

import (
	"os"
	"slices"
	"testing"
)

func TestPageHasCommandsBelowHeadings(t *testing.T) {
	p := parse("# Title\n\n## One\n\ntext\n\n```sh\na\nb <<'END'\nc\nEND\nd\n```\n```toml\ne\n```\n\n## Two\n```sh\nf\n```\n```sh\ng\n```\n")
	for name, c := range map[string]struct{ got, want []string }{
		"One, first":  {p["One"][0], []string{"a", "b <<'END'\nc\nEND", "d"}},
		"Two, first":  {p["Two"][0], []string{"f"}},
		"Two, second": {p["Two"][1], []string{"g"}},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s: %q, want %q", name, c.got, c.want)
		}
	}
	if len(p) != 2 || len(p["One"]) != 1 {
		t.Errorf("%q", p)
	}
}

// The page contains the operator's commands, whatever its wording.
func TestInstallPageHasItsBlocks(t *testing.T) {
	text, err := os.ReadFile("../../../docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	p := parse(string(text))
	for heading, blocks := range map[string]int{"Packages": 3, "Start": 1, "Try it": 1, "Remove": 1} {
		if got := len(p[heading]); got != blocks {
			t.Errorf("%s has %d blocks of commands, want %d", heading, got, blocks)
		}
	}
}
