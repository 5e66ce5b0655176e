package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/term"
)

// Pages shows each page that is written to it. On a terminal a page replaces the one
// before, and lines that do not fit are left out; elsewhere it follows the one before.
type Pages struct {
	out    io.Writer
	height func() int // of the terminal, in lines; nil: not a terminal
	lines  int        // of the page on the screen
}

// NewPages returns Pages that writes to out.
func NewPages(out io.Writer) *Pages {
	p := &Pages{out: out}
	if terminal, ok := out.(*os.File); ok && IsTerminal(out) {
		p.height = func() int {
			_, height, err := term.GetSize(int(terminal.Fd()))
			if err != nil || height < 2 {
				return 24
			}
			return height
		}
	}
	return p
}

// Terminal reports whether pages replace each other.
func (p *Pages) Terminal() bool { return p.height != nil }

// Write shows a page. The page must be whole and end with a newline.
func (p *Pages) Write(page []byte) (int, error) {
	if p.height == nil {
		return p.out.Write(page)
	}
	const up, clear, cut, wrap = "\x1b[%dA", "\r\x1b[J", "\x1b[?7l", "\x1b[?7h" // of long lines
	var b bytes.Buffer
	if p.lines > 0 {
		fmt.Fprintf(&b, up, p.lines)
	}
	b.WriteString(clear + cut)
	p.lines = 0
	for line := range bytes.Lines(page) {
		if p.lines == p.height()-1 { // the cursor is in the last one
			break
		}
		b.Write(line)
		p.lines++
	}
	b.WriteString(wrap)
	if _, err := b.WriteTo(p.out); err != nil {
		return 0, err
	}
	return len(page), nil
}

// Changes returns a writer that drops a page which is the same as the one before.
func Changes(out io.Writer) io.Writer { return &changes{out: out} }

type changes struct {
	out  io.Writer
	last []byte
}

func (c *changes) Write(page []byte) (int, error) {
	if c.last != nil && bytes.Equal(page, c.last) {
		return len(page), nil
	}
	c.last = bytes.Clone(page)
	return c.out.Write(page)
}

// Pause waits for d and reports whether ctx is still alive.
func Pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
