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
	fetched, asked := errors.New("of the registry"), errors.New("of the store")
	original := func(f *Failure) error {
		switch {
		case f.Fetch == 2:
			return fetched
		case f.Question == 2:
			return asked
		}
		return nil
	}
	for _, err := range append([]error{&FetchError{2, "text"}, &QuestionError{2, errors.New("text")}, errors.New("other")}, carried...) {
		got := FailureOf(fmt.Errorf("step: %w", err)).Arrived(original)
		if got.Error() != "step: "+err.Error() {
			t.Errorf("%v has become %v", err, got)
		}
		for _, kind := range append([]error{fetched, asked}, carried...) {
			want := errors.Is(err, kind) || errors.Is(kind, fetched) && errors.As(err, new(*FetchError)) || errors.Is(kind, asked) && errors.As(err, new(*QuestionError))
			if errors.Is(got, kind) != want {
				t.Errorf("%v is %v: %t", got, kind, !want)
			}
		}
	}
	refused := func(*Failure) error { return fmt.Errorf("layer: %w", &httpError{StatusCode: 503}) }
	if got := (&Failure{Text: "copy: layer", Fetch: 1}).Arrived(refused); !slices.Contains(pullerror.Kinds(got), fault.Unavailable) {
		t.Errorf("the status of the registry's answer is lost: %v", pullerror.Kinds(got))
	}
	if hostile := (&Failure{Kinds: []int{-1, len(carried)}, Fetch: -1}).Arrived(original); len(pullerror.Kinds(hostile)) > 0 {
		t.Errorf("%v", pullerror.Kinds(hostile))
	}
}

// httpError has its status where one of the library's types has it.
type httpError struct{ StatusCode int }

func (e *httpError) Error() string { return fmt.Sprint(e.StatusCode) }
