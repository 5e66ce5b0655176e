// Package capture keeps what other programs print, in bounded memory: neither one
// program that prints without end nor many that print little cost much.
package capture

import (
	"io"
	"strings"
)

// Head keeps the first Max bytes that are written to it.
type Head struct {
	Max int
	// Full is called when there are more, and what it returns ends the writing.
	// Nil: they are swallowed, so that their writer is not blocked.
	Full func() error
	// Budget is asked for what goes beyond the first Free bytes; what it does not
	// grant is more than Max. Nil: all of Max is free.
	Budget *Budget
	Free   int

	kept []byte
}

// Write always takes all of p, unless Full refuses it.
func (h *Head) Write(p []byte) (int, error) {
	room := min(h.Max-len(h.kept), len(p))
	if room = h.granted(room); room < len(p) {
		h.Max = len(h.kept) + room // nothing is kept after a gap
	}
	h.kept = append(h.kept, p[:room]...)
	if room < len(p) && h.Full != nil {
		if err := h.Full(); err != nil {
			return room, err
		}
	}
	return len(p), nil
}

// granted is how many of n further bytes may be kept.
func (h *Head) granted(n int) int {
	if h.Budget == nil {
		return n
	}
	free := min(n, max(0, h.Free-len(h.kept)))
	return free + h.Budget.take(n-free)
}

// ReadFrom spares io.Copy its 32 KiB.
func (h *Head) ReadFrom(r io.Reader) (int64, error) { return through(h, r) }

// Bytes is what has been kept; the caller must not modify it while more is written.
func (h *Head) Bytes() []byte { return h.kept }

// Tail keeps the last Max bytes that are written to it: of a diagnosis the end is
// what matters.
type Tail struct {
	Max int

	kept []byte
}

// Write always takes all of p.
func (t *Tail) Write(p []byte) (int, error) {
	t.kept = append(t.kept, p[max(0, len(p)-t.Max):]...)
	if over := len(t.kept) - t.Max; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	return len(p), nil
}

// ReadFrom spares io.Copy its 32 KiB.
func (t *Tail) ReadFrom(r io.Reader) (int64, error) { return through(t, r) }

// String is what has been kept as valid UTF-8, without space around it.
func (t *Tail) String() string {
	return strings.TrimSpace(strings.ToValidUTF8(string(t.kept), "\uFFFD"))
}

// through copies from r to w, by way of no more memory than most programs have
// words.
func through(w io.Writer, r io.Reader) (int64, error) {
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, make([]byte, 1<<10))
}
