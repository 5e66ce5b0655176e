package cli

import (
	"fmt"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/terminal"
	"github.com/crius-run/crius/test/kit/wait"
)

// On a terminal a page replaces the one before and has no more lines than fit.
func TestPages(t *testing.T) {
	t.Parallel()
	term := terminal.Open(t)
	term.Resize(t, 80, 3)
	pages := NewPages(term.File)
	for _, page := range []string{"one\n", "a\nb\nc\nd\n", "", "last\n"} {
		if n, err := fmt.Fprint(pages, page); n != len(page) || err != nil {
			t.Errorf("%d, %v", n, err)
		}
	}
	const cut, wrap = "\r\x1b[J\x1b[?7l", "\x1b[?7h"
	want := cut + "one\n" + wrap + "\x1b[1A" + cut + "a\nb\n" + wrap + "\x1b[2A" + cut + wrap + cut + "last\n" + wrap
	if !wait.Until(t.Context(), func() bool { return term.Shown() == want }) {
		t.Errorf("the terminal gets %q, want %q", term.Shown(), want)
	}
	var plain strings.Builder
	pages = NewPages(&plain)
	fmt.Fprint(pages, "one\n")
	fmt.Fprint(pages, "a\nb\nc\nd\n")
	if got := plain.String(); got != "one\na\nb\nc\nd\n" {
		t.Errorf("elsewhere: %q", got)
	}
}
