package logx

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Journal reports whether w is a stream that systemd has connected to the
// journal: JOURNAL_STREAM holds its device and inode number (systemd.exec(5)).
// A descriptor that was redirected since no longer matches.
func Journal(w io.Writer) bool {
	file, ok := w.(*os.File)
	stream := os.Getenv("JOURNAL_STREAM")
	if !ok || stream == "" {
		return false
	}
	var st unix.Stat_t
	if unix.Fstat(int(file.Fd()), &st) != nil {
		return false
	}
	return stream == fmt.Sprintf("%d:%d", st.Dev, st.Ino)
}

// Prefix returns the prefix by which the journal files a line under the
// priority of level (sd-daemon(3)).
func Prefix(level slog.Level) string {
	switch {
	case level >= slog.LevelError:
		return "<3>"
	case level >= slog.LevelWarn:
		return "<4>"
	case level >= slog.LevelInfo:
		return "<6>"
	}
	return "<7>"
}

// journal writes records with the priority under which the journal files them.
type journal struct {
	slog.Handler // writes to the output's buffer
	output       *output
	keepTime     bool
}

// output is shared by a handler and all that WithAttrs derives from it.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
	out io.Writer
}

// newJournal returns a handler that writes records to out. Text omits the time,
// which the journal adds; JSON keeps it for programs that read it.
func newJournal(out io.Writer, json bool, options *slog.HandlerOptions) journal {
	o := &output{out: out}
	if json {
		return journal{slog.NewJSONHandler(&o.buf, options), o, true}
	}
	return journal{slog.NewTextHandler(&o.buf, options), o, false}
}

// Handle writes priority and record in one write, so that no other line comes
// between.
func (h journal) Handle(ctx context.Context, r slog.Record) error {
	h.output.mu.Lock()
	defer h.output.mu.Unlock()
	if !h.keepTime {
		r.Time = time.Time{}
	}
	h.output.buf.Reset()
	h.output.buf.WriteString(Prefix(r.Level))
	if err := h.Handler.Handle(ctx, r); err != nil {
		return err
	}
	_, err := h.output.out.Write(h.output.buf.Bytes())
	return err
}

func (h journal) WithAttrs(attrs []slog.Attr) slog.Handler {
	h.Handler = h.Handler.WithAttrs(attrs)
	return h
}

func (h journal) WithGroup(name string) slog.Handler {
	h.Handler = h.Handler.WithGroup(name)
	return h
}
