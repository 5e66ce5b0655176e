package storage

import (
	"io"
	"log/slog"

	"github.com/sirupsen/logrus"
)

// captureLogs sends what containers/storage and containers/image have to say
// to slog. Their informational messages narrate every step and are dropped.
func captureLogs() {
	logrus.SetOutput(io.Discard)
	logrus.SetLevel(logrus.WarnLevel)
	logrus.AddHook(slogHook{})
}

type slogHook struct{}

func (slogHook) Levels() []logrus.Level { return logrus.AllLevels }

func (slogHook) Fire(entry *logrus.Entry) error {
	level := slog.LevelWarn
	if entry.Level <= logrus.ErrorLevel {
		level = slog.LevelError
	}
	slog.Log(entry.Context, level, cut(redact(entry.Message)), "from", "containers libraries") //nolint:sloglint // the libraries word it
	return nil
}
