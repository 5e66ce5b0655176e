package stream

import (
	"context"
	"log/slog"

	"k8s.io/klog/v2"
)

// LogTo sends what the libraries below this package log to logger, as debug
// messages: they complain about clients, which is no news for an operator. A
// panic that they have survived is.
func LogTo(logger *slog.Logger) {
	klog.SetSlogLogger(slog.New(quiet{logger.Handler()}))
}

type quiet struct{ slog.Handler }

func (h quiet) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelError || h.Handler.Enabled(ctx, slog.LevelDebug)
}

func (h quiet) Handle(ctx context.Context, r slog.Record) error {
	const survived = "Observed a panic" // k8s.io/streaming/pkg/runtime
	if r.Message != survived {
		r.Level = slog.LevelDebug
	}
	if !h.Handler.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

func (h quiet) WithAttrs(attrs []slog.Attr) slog.Handler { return quiet{h.Handler.WithAttrs(attrs)} }
func (h quiet) WithGroup(name string) slog.Handler       { return quiet{h.Handler.WithGroup(name)} }
