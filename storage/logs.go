package storage

import (
	"context"
	"io"
	"log/slog"

	"github.com/sirupsen/logrus"

	"github.com/crius-run/crius/storage/pullerror"
)

// captureLogs sends what containers/storage and containers/image have to say
// to emit. Their informational messages narrate every step and are dropped.
func captureLogs(emit libraryHook) {
	logrus.SetOutput(io.Discard)
	logrus.SetLevel(logrus.WarnLevel)
	logrus.AddHook(emit)
}

// libraryHook is given each message of the libraries, safe to show.
type libraryHook func(ctx context.Context, level slog.Level, text string)

// Levels implements logrus.Hook.
func (libraryHook) Levels() []logrus.Level { return logrus.AllLevels }

// Fire implements logrus.Hook.
func (h libraryHook) Fire(entry *logrus.Entry) error {
	level := slog.LevelWarn
	if entry.Level <= logrus.ErrorLevel {
		level = slog.LevelError
	}
	h(entry.Context, level, pullerror.Cut(pullerror.Redact(entry.Message)))
	return nil
}

func logLibrary(ctx context.Context, level slog.Level, text string) {
	slog.Log(ctx, level, text, "from", "containers libraries") //nolint:sloglint // the libraries word it
}
