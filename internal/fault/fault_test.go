package fault

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

func TestText(t *testing.T) {
	t.Parallel()
	twice := fmt.Errorf("reach monitor: %w: %w", fmt.Errorf("it has left: %w", Unavailable), Unavailable)
	for want, err := range map[string]error{
		"plain":                           errors.New("plain"),
		"reach monitor: it has left":      twice,
		"no runc: install it":             fmt.Errorf("%w: no runc: install it: %w", Unavailable, Unavailable),
		"pod a: not there: install it":    fmt.Errorf("pod a: not there: %w: install it", Unavailable),
		"x: unavailable: foreign words":   errors.New("x: unavailable: foreign words"),
		"a: gone\nb":                      errors.Join(fmt.Errorf("a: gone: %w", NotFound), fmt.Errorf("b: %w: %w", Unavailable, Unavailable)),
		"unavailable":                     fmt.Errorf("%w: %w", Unavailable, Unavailable),
		"pod a not found":                 fmt.Errorf("pod a %w", NotFound),
		"open /x: permission denied":      fmt.Errorf("open /x: %w: %w", unix.EACCES, Denied),
		"mount: x: not found: y":          fmt.Errorf("mount: %w: %w", errors.New("x: not found: y"), NotFound),
		"mount: no such thing: not found": fmt.Errorf("mount: %w: %w", errors.New("no such thing: not found"), NotFound),
		"panic: internal error (panic); stack trace in the log": fmt.Errorf("panic: %w", Internal),
		"internal error (panic); stack trace in the log":        Internal,
	} {
		if got := Text(err); got != want {
			t.Errorf("%q is told as %q, want %q", err, got, want)
		}
	}
}
