package wire

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/pullerror"
)

// Errors mean the same on both sides of the socket.
func TestErrors(t *testing.T) {
	t.Parallel()
	fetched := errors.New("of the registry")
	fetch := func(n int) error {
		if n == 2 {
			return fetched
		}
		return nil
	}
	for _, err := range append([]error{&FetchError{2, "text"}, errors.New("other")}, carried...) {
		got := FailureOf(fmt.Errorf("step: %w", err)).Arrived(fetch)
		if got.Error() != "step: "+err.Error() {
			t.Errorf("%v has become %v", err, got)
		}
		for _, kind := range append([]error{fetched}, carried...) {
			want := errors.Is(err, kind) || errors.Is(kind, fetched) && errors.As(err, new(*FetchError))
			if errors.Is(got, kind) != want {
				t.Errorf("%v is %v: %t", got, kind, !want)
			}
		}
	}
	refused := func(int) error { return fmt.Errorf("layer: %w", &httpError{StatusCode: 503}) }
	if got := (&Failure{Text: "copy: layer", Fetch: 1}).Arrived(refused); !slices.Contains(pullerror.Kinds(got), fault.Unavailable) {
		t.Errorf("the status of the registry's answer is lost: %v", pullerror.Kinds(got))
	}
	if hostile := (&Failure{Kinds: []int{-1, len(carried)}, Fetch: -1}).Arrived(fetch); len(pullerror.Kinds(hostile)) > 0 {
		t.Errorf("%v", pullerror.Kinds(hostile))
	}
}

// httpError has its status where one of the library's types has it.
type httpError struct{ StatusCode int }

func (e *httpError) Error() string { return fmt.Sprint(e.StatusCode) }
