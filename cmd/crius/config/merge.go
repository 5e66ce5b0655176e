package config

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/BurntSushi/toml"
)

// merge applies one file to the configuration and returns its problems in the order of its
// lines.
func (l *Loaded) merge(f file) []error {
	var top map[string]toml.Primitive
	md, err := toml.Decode(f.data, &top)
	if parse := (toml.ParseError{}); errors.As(err, &parse) {
		return []error{&Problem{Where: place(f.path, parse.Position.Line), Text: parse.Message}}
	} else if err != nil {
		return []error{&Problem{Where: f.path, Text: err.Error()}}
	}
	m := merger{file: f, md: md, origin: l.origin}
	m.table(reflect.ValueOf(&l.Config).Elem(), "", top)
	slices.SortStableFunc(m.problems, func(a, b *Problem) int { return cmp.Compare(a.line, b.line) })
	problems := make([]error, len(m.problems))
	for i, p := range m.problems {
		problems[i] = p
	}
	return problems
}

// merger applies one decoded file to a configuration.
type merger struct {
	file     file
	md       toml.MetaData
	origin   map[string]origin
	problems []*Problem
}

// table applies a TOML table to the struct dst, which has this path.
func (m *merger) table(dst reflect.Value, path string, src map[string]toml.Primitive) {
	known := map[string]reflect.Value{}
	for f := range fields(dst) {
		known[f.name] = f.value
	}
	for _, name := range slices.Sorted(maps.Keys(src)) {
		at, value := join(path, name), src[name]
		field, ok := known[name]
		switch {
		case !ok:
			m.problem(value, at, "unknown key"+hint(path, name, slices.Sorted(maps.Keys(known))))
		case field.Kind() == reflect.Struct:
			m.table(field, at, m.inner(value, at))
		case field.Kind() == reflect.Map:
			m.tables(field, at, m.inner(value, at))
		default:
			m.leaf(field, at, value)
		}
	}
}

// leaf sets one option.
func (m *merger) leaf(dst reflect.Value, path string, src toml.Primitive) {
	var decoded any
	err := m.md.PrimitiveDecode(src, &decoded)
	if err == nil {
		err = assign(dst, decoded)
	}
	if err != nil {
		m.problem(src, path, err.Error())
		return
	}
	m.origin[path] = origin{m.file.kind, place(m.file.path, m.line(src))}
}

// tables applies TOML tables to the elements of the map dst. A new element begins with the
// defaults of its table.
func (m *merger) tables(dst reflect.Value, path string, src map[string]toml.Primitive) {
	for _, name := range slices.Sorted(maps.Keys(src)) {
		at := join(path, name)
		merged := element(dst, name)
		m.table(merged, at, m.inner(src[name], at))
		dst.SetMapIndex(reflect.ValueOf(name), merged)
	}
}

// inner returns a value as a table. For any other value it notes a problem and returns an
// empty table.
func (m *merger) inner(value toml.Primitive, at string) map[string]toml.Primitive {
	var decoded any
	var table map[string]toml.Primitive
	err := errors.Join(m.md.PrimitiveDecode(value, &decoded), m.md.PrimitiveDecode(value, &table))
	if _, ok := decoded.(map[string]any); !ok {
		err = fmt.Errorf("must be a table ([%s]), got %s", at, describe(decoded))
	}
	if err != nil {
		m.problem(value, at, err.Error())
	}
	return table
}

func (m *merger) problem(value toml.Primitive, at, text string) {
	line := m.line(value)
	m.problems = append(m.problems, &Problem{Where: place(m.file.path, line), Key: at, Text: text, line: line})
}

// line returns the line of a value, or 0. The decoder reports it only in errors, so
// decoding must fail.
func (m *merger) line(value toml.Primitive) int {
	var parse toml.ParseError
	_ = errors.As(m.md.PrimitiveDecode(value, new(refusal)), &parse)
	return parse.Position.Line
}

type refusal struct{}

func (*refusal) UnmarshalTOML(any) error { return errors.New("refused") }

// place formats FILE:LINE as editors and compilers do.
func place(path string, line int) string {
	if line == 0 {
		return path
	}
	return fmt.Sprintf("%s:%d", path, line)
}
