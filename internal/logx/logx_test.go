package logx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

// logger writes into the returned buffer, without the time of day.
func logger(t *testing.T, format string, level slog.Leveler) (*slog.Logger, *strings.Builder) {
	t.Helper()
	var b strings.Builder
	l, err := New(&b, format, level)
	if err != nil {
		t.Fatal(err)
	}
	return l, &b
}

// line returns the single line in b, from the message on.
func line(t *testing.T, b *strings.Builder) string {
	t.Helper()
	text := b.String()
	if strings.Count(text, "\n") != 1 {
		t.Fatalf("want one line, got %q", text)
	}
	return strings.TrimSuffix(text[strings.Index(text, "msg"):], "\n")
}

func TestContextAttributes(t *testing.T) {
	bg := context.Background()
	pod := With(bg, "pod", "p1")
	for what, c := range map[string]struct {
		ctx  context.Context
		args []any
		want string
	}{
		"none":                   {bg, nil, `msg=hello`},
		"pairs":                  {With(bg, "pod", "p1", "pid", 7), nil, `msg=hello pod=p1 pid=7`},
		"attributes":             {With(bg, slog.Int("pid", 7)), nil, `msg=hello pid=7`},
		"inherited":              {With(pod, "container", "c1"), nil, `msg=hello pod=p1 container=c1`},
		"replaced":               {With(pod, "pod", "p2"), nil, `msg=hello pod=p2`},
		"parent is left alone":   {pod, nil, `msg=hello pod=p1`},
		"own ones come first":    {pod, []any{"err", "no"}, `msg=hello err=no pod=p1`},
		"own ones win":           {pod, []any{"pod", "p3"}, `msg=hello pod=p3`},
		"hostile text is quoted": {With(bg, "name", "a\nlevel=ERROR \x1b[2J"), nil, `msg=hello name="a\nlevel=ERROR \x1b[2J"`},
	} {
		l, b := logger(t, "text", slog.LevelInfo)
		l.InfoContext(c.ctx, "hello", c.args...)
		if got := line(t, b); got != c.want {
			t.Errorf("%s: %s, want %s", what, got, c.want)
		}
	}
}

func TestContextSurvivesWith(t *testing.T) {
	l, b := logger(t, "json", slog.LevelInfo)
	ctx := With(context.Background(), "pod", "p1")
	l.With("handler", "runc").WithGroup("image").InfoContext(ctx, "hello", "name", "x")
	if got, want := line(t, b), `msg":"hello","handler":"runc","image":{"name":"x","pod":"p1"}}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestRecordsCarryTheNamesOfTheirObject(t *testing.T) {
	SetNames(func(id string) []slog.Attr {
		switch id {
		case "p1":
			return []slog.Attr{slog.String("pod_name", "shop/cart")}
		case "c1":
			return []slog.Attr{slog.String("pod_name", "shop/cart"), slog.String("container_name", "app")}
		}
		return nil
	})
	defer naming.Store(nil)
	bg := context.Background()
	for what, c := range map[string]struct {
		ctx  context.Context
		args []any
		want string
	}{
		"pod":             {bg, []any{"pod", "p1"}, `msg=hello pod=p1 pod_name=shop/cart`},
		"container first": {bg, []any{"pod", "p1", "container", "c1"}, `msg=hello pod=p1 container=c1 pod_name=shop/cart container_name=app`},
		"cleanup":         {bg, []any{"id", "exit of c1"}, `msg=hello id="exit of c1" pod_name=shop/cart container_name=app`},
		"context":         {With(bg, "pod", "p1"), nil, `msg=hello pod=p1 pod_name=shop/cart`},
		"own name wins":   {bg, []any{"pod", "p1", "pod_name", "x"}, `msg=hello pod=p1 pod_name=x`},
		"unknown":         {bg, []any{"pod", "p2"}, `msg=hello pod=p2`},
	} {
		l, b := logger(t, "text", slog.LevelInfo)
		l.InfoContext(c.ctx, "hello", c.args...)
		if got := line(t, b); got != c.want {
			t.Errorf("%s: %s, want %s", what, got, c.want)
		}
	}
}

func TestLevels(t *testing.T) {
	var level slog.LevelVar
	l, b := logger(t, "text", &level)
	l.Debug("no")
	level.Set(slog.LevelDebug)
	l.Debug("yes")
	if got := line(t, b); got != "msg=yes" {
		t.Errorf("got %s", got)
	}
	for name, want := range map[string]slog.Level{"debug": -4, "info": 0, "warn": 4, "error": 8} {
		if got, err := Level(name); got != want || err != nil {
			t.Errorf("level %s is %v, %v", name, got, err)
		}
	}
	if _, err := Level("trace"); !errors.Is(err, fault.Invalid) {
		t.Errorf("level trace: %v", err)
	}
	if _, err := New(b, "xml", &level); !errors.Is(err, fault.Invalid) {
		t.Errorf("format xml: %v", err)
	}
}

// Errors are logged in the words that people read elsewhere.
func TestErrorsAreLoggedWithoutTheWordsOfTheirKind(t *testing.T) {
	t.Parallel()
	for format, want := range map[string]string{"text": `err="no runc: install it"`, "json": `"err":"no runc: install it"`} {
		l, b := logger(t, format, slog.LevelInfo)
		l.Info("m", "err", fmt.Errorf("no runc: install it: %w", fault.Unavailable), "n", 1)
		if !strings.Contains(b.String(), want) {
			t.Errorf("%s lacks %s", b.String(), want)
		}
	}
}
