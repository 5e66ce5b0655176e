package metrics

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

const (
	// healthTime bounds how long a probe waits for its answer.
	healthTime = 5 * time.Second
	// healthAge is how old an answer may be: any client that reaches the address
	// may ask often.
	healthAge = time.Second
)

var errNoAnswer = fmt.Errorf("not known within %s; crius status --stuck may say what the server waits for", healthTime)

// health answers GET /healthz: 200 and "ok", or 503 and the reason.
type health struct {
	check func(context.Context) error

	mu   sync.Mutex // held during a check
	at   time.Time
	last error
}

func (h *health) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	text := "ok"
	if err := h.now(r.Context()); err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		text = fault.Text(err)
	}
	_, _ = w.Write([]byte(text + "\n")) // a client that has left does not need it
}

// now returns the last answer or, if that is too old, a new one. A new one
// outlives the request, for the next request.
func (h *health) now(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.at.IsZero() && time.Since(h.at) < healthAge {
		return h.last
	}
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), healthTime, errNoAnswer)
	defer cancel()
	h.last = h.check(ctx)
	h.at = time.Now()
	return h.last
}
