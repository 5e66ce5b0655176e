package main

import (
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/pod"
)

// A container that is being checkpointed is shown by its name, and whether it is frozen.
func TestStatusShowsCheckpoints(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	writeCheckpoints(&b, nil)
	writeCheckpoints(&b, []pod.Checkpointing{
		{ID: "c1", Name: "default/web/main", Since: time.Now().Add(-time.Hour), Frozen: true}, {ID: "c2", Since: time.Now().Add(-time.Hour)},
	})
	const first, second = "checkpoints\tdefault/web/main (c1): frozen, for 1h0m", "\n\tc2: runs, for 1h0m"
	if got := b.String(); !strings.HasPrefix(got, first) || !strings.Contains(got, second) {
		t.Errorf("%q", got)
	}
}

func TestNothingIsStuck(t *testing.T) {
	var out strings.Builder
	writeStuck(&out, nil)
	if got := out.String(); got != "no operation takes longer than 10s\n" {
		t.Errorf("%q", got)
	}
}
