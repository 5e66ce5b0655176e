// Package capture keeps the output of other programs in bounded memory: neither
// one program that prints without end nor many that print little cost much.
package capture

import (
	"io"
	"strings"
)

// Head keeps the first Max bytes that are written to it.
type Head struct {
	Max int
	// Full is called when there is more; its error ends the writing. Nil: further
	// bytes are discarded, so that their writer is not blocked.
	Full func() error
	// Budget must grant the memory beyond the first Free bytes; bytes that it
	// refuses count as more than Max. Nil: all of Max is free.
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

// granted returns how many of n further bytes may be kept.
func (h *Head) granted(n int) int {
	if h.Budget == nil {
		return n
	}
	free := min(n, max(0, h.Free-len(h.kept)))
	return free + h.Budget.take(n-free)
}

// ReadFrom saves io.Copy its 32 KiB buffer.
func (h *Head) ReadFrom(r io.Reader) (int64, error) { return through(h, r) }

// Bytes returns what has been kept; the caller must not modify it while more is
// written.
func (h *Head) Bytes() []byte { return h.kept }

// Tail keeps the last Max bytes that are written to it: a diagnosis has what
// matters at its end.
type Tail struct {
	Max int

	first []byte
	kept  []byte
}

// maxBegin is enough for what a program that crashes says before its stack.
const maxBegin = 256

// Write always takes all of p.
func (t *Tail) Write(p []byte) (int, error) {
	t.first = append(t.first, p[:min(len(p), maxBegin-len(t.first))]...)
	t.kept = append(t.kept, p[max(0, len(p)-t.Max):]...)
	if over := len(t.kept) - t.Max; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	return len(p), nil
}

// ReadFrom saves io.Copy its 32 KiB buffer.
func (t *Tail) ReadFrom(r io.Reader) (int64, error) { return through(t, r) }

// String returns what has been kept as valid UTF-8, trimmed of space.
func (t *Tail) String() string {
	return strings.TrimSpace(strings.ToValidUTF8(string(t.kept), "\uFFFD"))
}

// Begin returns the first bytes that were written, whether they have been kept or not.
func (t *Tail) Begin() string { return string(t.first) }

// through copies from r to w through a small buffer, large enough for the
// output of most programs.
func through(w io.Writer, r io.Reader) (int64, error) {
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, make([]byte, 1<<10))
}
