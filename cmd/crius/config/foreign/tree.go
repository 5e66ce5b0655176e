package foreign

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
)

// leaf is a value with its place in a file.
type leaf struct {
	value any // from the decoder
	place string
}

// table is a TOML table whose values know their places.
type table struct {
	leaves map[string]leaf
	tables map[string]*table
}

func newTable() *table { return &table{leaves: map[string]leaf{}, tables: map[string]*table{}} }

// parse parses a TOML document. Messages call it path.
func parse(path string, data []byte) (*table, error) {
	var top map[string]toml.Primitive
	md, err := toml.Decode(string(data), &top)
	if wrong := (toml.ParseError{}); errors.As(err, &wrong) {
		return nil, &Problem{Place: fmt.Sprintf("%s:%d", path, wrong.Position.Line), Text: wrong.Message}
	} else if err != nil {
		return nil, &Problem{Place: path, Text: err.Error()}
	}
	return (&parser{path, md}).table(top)
}

type parser struct {
	path string
	md   toml.MetaData
}

func (p *parser) table(from map[string]toml.Primitive) (*table, error) {
	t := newTable()
	for name, primitive := range from {
		var value any
		if err := p.md.PrimitiveDecode(primitive, &value); err != nil {
			return nil, &Problem{Place: p.place(primitive), Key: name, Text: err.Error()}
		}
		if _, ok := value.(map[string]any); !ok {
			t.leaves[name] = leaf{value, p.place(primitive)}
			continue
		}
		var inner map[string]toml.Primitive
		if err := p.md.PrimitiveDecode(primitive, &inner); err != nil {
			return nil, &Problem{Place: p.place(primitive), Key: name, Text: err.Error()}
		}
		below, err := p.table(inner)
		if err != nil {
			return nil, err
		}
		t.tables[name] = below
	}
	return t, nil
}

// place returns FILE:LINE of a value. The decoder reports the line only in errors, so
// decoding must fail.
func (p *parser) place(value toml.Primitive) string {
	var wrong toml.ParseError
	if !errors.As(p.md.PrimitiveDecode(value, new(refusal)), &wrong) || wrong.Position.Line == 0 {
		return p.path
	}
	return fmt.Sprintf("%s:%d", p.path, wrong.Position.Line)
}

type refusal struct{}

// UnmarshalTOML refuses every value.
func (*refusal) UnmarshalTOML(any) error { return errors.New("refused") }

// fill takes from other what t lacks.
func (t *table) fill(other *table) {
	for name, l := range other.leaves {
		if _, has := t.leaves[name]; !has {
			t.leaves[name] = l
		}
	}
	for name, inner := range other.tables {
		if t.tables[name] == nil {
			t.tables[name] = newTable()
		}
		t.tables[name].fill(inner)
	}
}

// leaf finds the value at a path.
func (t *table) leaf(path ...string) (leaf, bool) {
	inner := t.table(path[:len(path)-1]...)
	if inner == nil {
		return leaf{}, false
	}
	l, ok := inner.leaves[path[len(path)-1]]
	return l, ok
}

// table finds the table at a path, nil if there is none.
func (t *table) table(path ...string) *table {
	for _, name := range path {
		if t == nil {
			return nil
		}
		t = t.tables[name]
	}
	return t
}

// overlay merges another table into this one. A table for which whole returns true replaces
// the earlier one.
func (t *table) overlay(over *table, whole func(path []string) bool, at ...string) {
	for name, l := range over.leaves {
		t.leaves[name] = l
		delete(t.tables, name)
	}
	for name, below := range over.tables {
		path := append(slices.Clone(at), name)
		old := t.tables[name]
		if old == nil || whole(path) {
			old = newTable()
			t.tables[name] = old
			delete(t.leaves, name)
		}
		old.overlay(below, whole, path...)
	}
}

// walk calls visit for each value, in the order of the keys. A table for which atom returns
// true is one value.
func (t *table) walk(atom func(path []string) bool, visit func(path []string, l leaf), at ...string) {
	for _, name := range slices.Sorted(maps.Keys(t.leaves)) {
		visit(append(slices.Clone(at), name), t.leaves[name])
	}
	for _, name := range slices.Sorted(maps.Keys(t.tables)) {
		path := append(slices.Clone(at), name)
		if below := t.tables[name]; atom(path) {
			visit(path, below.asLeaf())
		} else {
			below.walk(atom, visit, path...)
		}
	}
}

// keys visits every key that is set. A table for which there is a rule is one value.
func (c *conversion) keys(general func(path []string) (key, name string), visit func(found)) {
	c.top.walk(func(path []string) bool {
		key, _ := general(path)
		_, known := c.rules[key]
		return known
	}, func(path []string, l leaf) {
		key, name := general(path)
		visit(found{l, keyOf(path), key, name})
	})
}

// asLeaf returns a table as one value, with the place of its first key.
func (t *table) asLeaf() leaf {
	all := leaf{value: t.asMap()}
	t.walk(func([]string) bool { return false }, func(_ []string, l leaf) {
		if all.place == "" {
			all.place = l.place
		}
	})
	return all
}

func (t *table) asMap() map[string]any {
	all := map[string]any{}
	for name, l := range t.leaves {
		all[name] = l.value
	}
	for name, below := range t.tables {
		all[name] = below.asMap()
	}
	return all
}

// keyOf formats a path as a TOML key.
func keyOf(path []string) string { return toml.Key(path).String() }

// Format formats a decoded value as TOML for comments and comparisons.
func Format(value any) string {
	switch v := value.(type) {
	case string:
		return fmt.Sprintf("%q", v)
	case []string:
		items := make([]any, len(v))
		for i, item := range v {
			items[i] = item
		}
		return Format(items)
	case []any:
		items := make([]string, len(v))
		for i, item := range v {
			items[i] = Format(item)
		}
		return "[" + strings.Join(items, ", ") + "]"
	case map[string]any:
		var items []string
		for _, name := range slices.Sorted(maps.Keys(v)) {
			items = append(items, toml.Key{name}.String()+" = "+Format(v[name]))
		}
		return "{" + strings.Join(items, ", ") + "}"
	}
	return fmt.Sprint(value)
}
