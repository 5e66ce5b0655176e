// Package liblog has containers/storage and containers/image log as crius does.
package liblog

import (
	"context"
	"io"
	"log/slog"

	"github.com/sirupsen/logrus"
)

// Capture sends what containers/storage and containers/image have to say
// to emit. Their informational messages narrate every step and are dropped.
func Capture(emit Hook) {
	logrus.SetOutput(io.Discard)
	logrus.SetLevel(logrus.WarnLevel)
	logrus.AddHook(emit)
}

// Hook is given each message of the libraries. It may contain secrets (pullerror.Redact).
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
	slog.Log(ctx, level, text, "from", "containers libraries") //nolint:sloglint // the libraries word it
}
