package oci

import (
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// runtimeLog is where a runtime logs what it does at create and at start.
func runtimeLog(ref Ref) string { return filepath.Join(ref.Dir, "runtime.log") }

// logged puts in front of args what makes the runtime log to file: its standard
// error then ends with the error as one line of plain text; see errorAlone. A handler that logs elsewhere by its own options is left alone. So is a
// runtime with sandboxes; see quirks.log.
//
// Its log is not asked for as JSON: crun would write the error of an exec that
// fails after the start as JSON as well, into the container's log.
func (r *cli) logged(a *Abilities, file string, args []string) []string {
	elsewhere := slices.ContainsFunc(r.handler.Options, func(o string) bool { return o == "--log" || strings.HasPrefix(o, "--log=") })
	if a.quirks.sandboxed || elsewhere {
		return args
	}
	return append([]string{"--log=" + file}, args...)
}

// errorAlone is the error of what a runtime has said: its last line. Before it there
// may be crun's warnings, or complaints of runc's children that nobody reads their
// log any more, which are logged at debug.
func errorAlone(ctx context.Context, said string) string {
	said = strings.TrimSpace(said)
	end := strings.LastIndexByte(said, '\n') + 1
	if end > 0 {
		slog.DebugContext(ctx, "additional runtime output", "text", said)
	}
	return said[end:]
}

// relayLog passes the end of a runtime's log on to the server's, at debug.
func (r *cli) relayLog(ctx context.Context, id, file string) {
	if !slog.Default().Enabled(ctx, slog.LevelDebug) {
		return
	}
	text := strings.TrimSpace(strings.ToValidUTF8(string(logTail(file, maxDiagnosis)), "\uFFFD"))
	if text != "" {
		slog.DebugContext(ctx, "runtime log", "container", id, "handler", r.name, "text", text)
	}
}

// logTail is at most the last max bytes of a file; nothing if it cannot be read.
func logTail(file string, max int64) []byte {
	f, err := os.Open(file)
	if err != nil {
		return nil
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > max {
		_, _ = f.Seek(-max, io.SeekEnd)
	}
	text, _ := io.ReadAll(io.LimitReader(f, max))
	return text
}
