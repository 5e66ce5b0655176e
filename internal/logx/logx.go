// Package logx chooses the handler behind log/slog and lets a context carry
// attributes, so that code deep in a call logs the pod and the container
// without getting them as arguments.
//
// All packages log through slog itself (slog.InfoContext and its siblings);
// only the program's entry and the code that learns an identity use this
// package.
package logx

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/crius-run/crius/internal/fault"
)

// Level translates the name of a level in the configuration.
func Level(name string) (slog.Level, error) {
	switch name {
	case "debug":
		return slog.LevelDebug, nil
	case "info":
		return slog.LevelInfo, nil
	case "warn":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, fmt.Errorf("log level %q: must be debug, info, warn or error: %w", name, fault.Invalid)
}

// New returns a logger that writes records of at least that level to w, in the
// format "text" or "json". A *slog.LevelVar lets the level change later. Records
// for the journal carry their priority.
func New(w io.Writer, format string, level slog.Leveler) (*slog.Logger, error) {
	options := &slog.HandlerOptions{Level: level, ReplaceAttr: errorText}
	switch {
	case format != "text" && format != "json":
	case Journal(w):
		return slog.New(handler{newJournal(w, format == "json", options)}), nil
	case format == "text":
		return slog.New(handler{slog.NewTextHandler(w, options)}), nil
	default:
		return slog.New(handler{slog.NewJSONHandler(w, options)}), nil
	}
	return nil, fmt.Errorf("log format %q: must be text or json: %w", format, fault.Invalid)
}

// errorText replaces an error by its text for people.
func errorText(_ []string, a slog.Attr) slog.Attr {
	if err, is := a.Value.Any().(error); is {
		a.Value = slog.StringValue(fault.Text(err))
	}
	return a
}

type attrsKey struct{}

// With returns a context whose log records carry the attributes, given as to
// slog.Logger.With. An attribute replaces one of the same key that the context
// already carries.
func With(ctx context.Context, args ...any) context.Context {
	var r slog.Record
	r.Add(args...)
	attrs := slices.Clone(attrsOf(ctx))
	r.Attrs(func(a slog.Attr) bool {
		attrs = slices.DeleteFunc(attrs, func(old slog.Attr) bool { return old.Key == a.Key })
		attrs = append(attrs, a)
		return true
	})
	return context.WithValue(ctx, attrsKey{}, attrs)
}

func attrsOf(ctx context.Context) []slog.Attr {
	attrs, _ := ctx.Value(attrsKey{}).([]slog.Attr)
	return attrs
}

// naming returns the names of the object that has an id.
var naming atomic.Pointer[func(id string) []slog.Attr]

// SetNames has each record that names a pod, a container or something else by its id, under one
// of the keys pod, container and id, carry the attributes that nameOf returns for the id: ids are
// on no other node, and in no manifest.
func SetNames(nameOf func(id string) []slog.Attr) { naming.Store(&nameOf) }

// namesIn returns the names of the object that a record is about: its container, or else its pod.
func namesIn(r slog.Record, attrs []slog.Attr) (names []slog.Attr) {
	nameOf := naming.Load()
	if nameOf == nil {
		return nil
	}
	ids := map[string]string{}
	note := func(a slog.Attr) bool {
		if _, known := ids[a.Key]; !known && a.Value.Kind() == slog.KindString {
			ids[a.Key] = a.Value.String()
		}
		return true
	}
	r.Attrs(note)
	for _, a := range attrs {
		note(a)
	}
	for _, key := range []string{"container", "pod", "id"} {
		if id := ids[key]; id != "" {
			if names = (*nameOf)(id[strings.LastIndexByte(id, ' ')+1:]); len(names) > 0 {
				return names
			}
		}
	}
	return nil
}

// handler adds the attributes of the context to each record, and the names of its object.
type handler struct{ slog.Handler }

func (h handler) Handle(ctx context.Context, r slog.Record) error {
	attrs := attrsOf(ctx)
	if names := namesIn(r, attrs); len(names) > 0 {
		attrs = append(slices.Clone(attrs), names...)
	}
	if len(attrs) == 0 {
		return h.Handler.Handle(ctx, r)
	}
	said := map[string]bool{}
	r.Attrs(func(a slog.Attr) bool { said[a.Key] = true; return true })
	r = r.Clone()
	for _, a := range attrs {
		if !said[a.Key] { // the record's own attribute wins
			said[a.Key] = true
			r.AddAttrs(a)
		}
	}
	return h.Handler.Handle(ctx, r)
}

func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return handler{h.Handler.WithAttrs(attrs)}
}

func (h handler) WithGroup(name string) slog.Handler { return handler{h.Handler.WithGroup(name)} }
