package fault

import (
	"errors"
	"fmt"
	"testing"
)

func TestText(t *testing.T) {
	t.Parallel()
	twice := fmt.Errorf("reach monitor: %w: %w", fmt.Errorf("it has left: %w", Unavailable), Unavailable)
	for want, err := range map[string]error{
		"plain": errors.New("plain"),
		"reach monitor: it has left: unavailable":        twice,
		"no runc: install it: unavailable":               fmt.Errorf("%w: no runc: install it: %w", Unavailable, Unavailable),
		"pod a: not there: install it":                   fmt.Errorf("pod a: not there: %w: install it", Unavailable),
		"x: unavailable: foreign words":                  errors.New("x: unavailable: foreign words"),
		"a: not found\nb: unavailable":                   errors.Join(fmt.Errorf("a: %w", NotFound), fmt.Errorf("b: %w: %w", Unavailable, Unavailable)),
		"unavailable":                                    fmt.Errorf("%w: %w", Unavailable, Unavailable),
		"internal error (panic); stack trace in the log": Internal,
	} {
		if got := Text(err); got != want {
			t.Errorf("%q is told as %q, want %q", err, got, want)
		}
	}
}
