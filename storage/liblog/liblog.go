// Package liblog makes containers/storage and containers/image log like crius.
package liblog

import (
	"context"
	"io"
	"log/slog"

	"github.com/sirupsen/logrus"
)

// Capture sends the messages of containers/storage and containers/image to emit. It drops
// informational ones, which report every step.
func Capture(emit Hook) {
	logrus.SetOutput(io.Discard)
	logrus.SetLevel(logrus.WarnLevel)
	logrus.AddHook(emit)
}

// Hook receives each message of the libraries. A message may contain secrets (pullerror.Redact).
type Hook func(ctx context.Context, level slog.Level, text string)

// Levels implements logrus.Hook.
func (Hook) Levels() []logrus.Level { return logrus.AllLevels }

// Fire implements logrus.Hook.
func (h Hook) Fire(entry *logrus.Entry) error {
	level := slog.LevelWarn
	if entry.Level <= logrus.ErrorLevel {
		level = slog.LevelError
	}
	h(entry.Context, level, entry.Message)
	return nil
}

// Log writes a message of the libraries, which is safe to show, to the log.
func Log(ctx context.Context, level slog.Level, text string) {
	slog.Log(ctx, level, text, "from", "containers libraries") //nolint:sloglint // the library words it
}
