package server

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/crius-run/crius/server/caller"
)

// A client of a newer CRI sends fields that this crius does not know, and only if it asks for
// something by them: a field with its default value is not sent. Protobuf keeps them without a
// word. One that a security context has may restrict a container or a pod, so its request is
// refused; any other is ignored, and the log says so.

// unknownField is a field that this version of CRI does not have.
type unknownField struct {
	path    string // of the message that has it, such as config.linux; empty: the request
	message protoreflect.FullName
	number  protowire.Number
	strict  bool // it stands in a security context
}

// String returns the place of the field.
func (f unknownField) String() string {
	return fmt.Sprintf("%s has field %d of %s", cmp.Or(f.path, "request"), f.number, f.message.Name())
}

// unknownFields are the unknown fields of a request at any depth, at most maxUnknown of them.
func unknownFields(m proto.Message) []unknownField {
	var found unknownFinder
	found.look("", m.ProtoReflect(), false)
	return found
}

// maxUnknown is more than any version of CRI adds.
const maxUnknown = 32

type unknownFinder []unknownField

func (f *unknownFinder) look(path string, m protoreflect.Message, strict bool) {
	for left := m.GetUnknown(); len(left) > 0; {
		number, _, n := protowire.ConsumeField(left)
		if n < 0 {
			break
		}
		left = left[n:]
		f.add(unknownField{path, m.Descriptor().FullName(), number, strict})
	}
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		f.lookInto(path, field, v, strict || strings.HasSuffix(string(field.Name()), "security_context"))
		return true
	})
}

// add leaves out a field that is repeated, and those after the first maxUnknown, but keeps a strict one.
func (f *unknownFinder) add(field unknownField) {
	if len(*f) >= maxUnknown {
		if field.strict {
			(*f)[maxUnknown-1] = field
		}
		return
	}
	for _, known := range *f {
		if known == field {
			return
		}
	}
	*f = append(*f, field)
}

func (f *unknownFinder) lookInto(path string, field protoreflect.FieldDescriptor, v protoreflect.Value, strict bool) {
	path = strings.TrimPrefix(path+"."+string(field.Name()), ".")
	switch {
	case field.IsMap():
		if field.MapValue().Kind() != protoreflect.MessageKind {
			return
		}
		v.Map().Range(func(_ protoreflect.MapKey, value protoreflect.Value) bool {
			f.look(path, value.Message(), strict)
			return true
		})
	case field.Kind() != protoreflect.MessageKind:
	case field.IsList():
		for i := range v.List().Len() {
			f.look(path, v.List().Get(i).Message(), strict)
		}
	default:
		f.look(path, v.Message(), strict)
	}
}

// unknownGuard refuses and reports unknown fields: each once for each field and kind of client,
// which is the name of its program.
type unknownGuard struct {
	mu   sync.Mutex
	told map[toldUnknown]struct{}
}

type toldUnknown struct {
	client  string
	message protoreflect.FullName
	number  protowire.Number
}

// maxTold bounds what the guard remembers. What comes after that is not reported.
const maxTold = 1024

// check returns an error for the first unknown field in a security context, and reports the
// others.
func (g *unknownGuard) check(ctx context.Context, req any) error {
	m, ok := req.(proto.Message)
	if !ok {
		return nil
	}
	fields := unknownFields(m)
	for _, f := range fields {
		if f.strict {
			return in(f.path, bad("has field %d of %s, which this crius does not know: upgrade crius, or do not ask for what the field means", f.number, f.message.Name()))
		}
	}
	for _, f := range fields {
		if client := caller.Of(ctx).Name; g.first(toldUnknown{client, f.message, f.number}) {
			slog.WarnContext(ctx, "request asks for something that this crius does not know and ignores: upgrade crius if it matters",
				"field", f.String(), "client", cmp.Or(client, "unknown"))
		}
	}
	return nil
}

// first reports whether a field is to be reported now.
func (g *unknownGuard) first(field toldUnknown) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, known := g.told[field]; known || len(g.told) >= maxTold {
		return false
	}
	if g.told == nil {
		g.told = make(map[toldUnknown]struct{})
	}
	g.told[field] = struct{}{}
	return true
}
