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

// runtimeLog returns the file to which a runtime logs during create and start.
func runtimeLog(ref Ref) string { return filepath.Join(ref.Dir, "runtime.log") }

// logged prepends the flags that make the runtime log to file: its standard
// error then ends with the error as one line of plain text; see errorAlone. It
// leaves alone a handler whose own options set a log, and a runtime with
// runtime sandboxes; see quirks.log.
//
// It does not request JSON: crun would also write the error of an exec that
// fails after the start as JSON, into the container's log.
func (r *cli) logged(a *Abilities, file string, args []string) []string {
	elsewhere := slices.ContainsFunc(r.handler.Options, func(o string) bool { return o == "--log" || strings.HasPrefix(o, "--log=") })
	if a.quirks.sandboxed || elsewhere {
		return args
	}
	return append([]string{"--log=" + file}, args...)
}

// errorAlone returns the error in a runtime's output: its last line. Before it
// there may be crun's warnings, or complaints of runc's children that their log
// has no reader any more, which are logged at debug.
func errorAlone(ctx context.Context, said string) string {
	said = strings.TrimSpace(said)
	end := strings.LastIndexByte(said, '\n') + 1
	if end > 0 {
		slog.DebugContext(ctx, "additional runtime output", "text", said)
	}
	return said[end:]
}

// relayLog copies the end of a runtime's log to the server's log, at debug.
func (r *cli) relayLog(ctx context.Context, id, file string) {
	if !slog.Default().Enabled(ctx, slog.LevelDebug) {
		return
	}
	text := strings.TrimSpace(strings.ToValidUTF8(string(logTail(file, maxDiagnosis)), "\uFFFD"))
	if text != "" {
		slog.DebugContext(ctx, "runtime log", "container", id, "handler", r.name, "text", text)
	}
}

// logTail returns at most the last max bytes of a file; nothing if it cannot be
// read.
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
