package remote

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// silence ends a context once the registry has owed something for longer than it may. How long a transfer takes in
// total does not matter, nor how long this node needs for its part of it.
type silence struct {
	limit time.Duration
	timer *time.Timer // nil: there is no limit
}

// errSilent means that a silence has ended the context.
var errSilent = errors.New("image.progress_timeout")

// unlessSilent calls do, with a context that ends when the registry is silent.
func (a Access) unlessSilent(ctx context.Context, do func(context.Context, silence) error) error {
	if a.ProgressTimeout == 0 {
		return do(ctx, silence{})
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := silence{limit: a.ProgressTimeout}
	s.timer = time.AfterFunc(s.limit, func() {
		cancel(fmt.Errorf("the registry has neither sent nor taken a byte for %s (%w): %w", s.limit, errSilent, fault.Timeout))
	})
	defer s.timer.Stop()
	err := do(ctx, s)
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, errSilent) {
		return cause // the library's error says less
	}
	return err
}

// begin begins a silence: the registry owes something.
func (s silence) begin() {
	if s.timer != nil {
		s.timer.Reset(s.limit)
	}
}

// end ends it: it is this node's turn.
func (s silence) end() {
	if s.timer != nil {
		s.timer.Stop()
	}
}

// received is a stream that comes from the registry.
type received struct {
	silence
	io.Reader
}

// Read implements io.Reader.
func (r received) Read(p []byte) (int, error) {
	r.begin()
	defer r.end()
	return r.Reader.Read(p)
}

// sent is a stream that goes to the registry, which the transport reads when the registry takes more.
type sent struct {
	silence
	io.Reader
}

// Read implements io.Reader.
func (s sent) Read(p []byte) (int, error) {
	s.end()
	defer s.begin()
	return s.Reader.Read(p)
}
