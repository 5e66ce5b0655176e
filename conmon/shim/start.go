package shim

import (
	"errors"
	"fmt"

	"github.com/crius-run/crius/internal/fault"
)

// StartOutcome is what crius-conmon-shim prints, in JSON, about a start.
type StartOutcome struct {
	Error       string `json:"error,omitempty"`       // empty: the container was started
	Unavailable bool   `json:"unavailable,omitempty"` // the shim has died, or cannot be reached now
}

// Outcome returns the outcome of a start that ended with err.
func Outcome(err error) StartOutcome {
	if err == nil {
		return StartOutcome{}
	}
	return StartOutcome{Error: fault.Text(err), Unavailable: errors.Is(err, fault.Unavailable)}
}

// Err returns the error of the start. It is fault.Unavailable if the shim could
// not be reached.
func (o StartOutcome) Err() error {
	switch {
	case o.Error == "":
		return nil
	case o.Unavailable:
		return fmt.Errorf("%s: %w", o.Error, fault.Unavailable)
	}
	return errors.New(o.Error)
}
