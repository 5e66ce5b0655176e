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
	logrus.SetFormatter(nothing{})
	logrus.SetLevel(logrus.WarnLevel)
	logrus.AddHook(emit)
}

// Listen sends debug messages of the libraries to hear, beside the others, which go to emit of
// Capture. They are many, so hear must be quick.
func Listen(hear func(text string)) {
	logrus.AddHook(listener(hear))
	logrus.SetLevel(logrus.DebugLevel)
}

// nothing formats messages that no one reads.
type nothing struct{}

func (nothing) Format(*logrus.Entry) ([]byte, error) { return nil, nil }

type listener func(text string)

// Levels implements logrus.Hook.
func (listener) Levels() []logrus.Level { return []logrus.Level{logrus.DebugLevel} }

// Fire implements logrus.Hook.
func (l listener) Fire(entry *logrus.Entry) error {
	l(entry.Message)
	return nil
}

// Hook receives each message of the libraries. A message may contain secrets (pullerror.Redact).
type Hook func(ctx context.Context, level slog.Level, text string)

// Levels implements logrus.Hook.
func (Hook) Levels() []logrus.Level {
	return []logrus.Level{logrus.PanicLevel, logrus.FatalLevel, logrus.ErrorLevel, logrus.WarnLevel}
}

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
