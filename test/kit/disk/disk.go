// Package disk tests that the JSON documents which crius writes stay as they are: another
// version of crius reads them, after an upgrade or a downgrade.
package disk

import (
	"bytes"
	"cmp"
	"encoding"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// Names compares the names, kinds and order of all fields of documents with those in
// testdata/names.txt. documents has a value of each type, by the name of its file. Every
// exported field must have its name in a tag, so that a rename in Go changes nothing on the
// disk.
func Names(t *testing.T, documents map[string]any) {
	t.Helper()
	const golden = "testdata/names.txt"
	var text strings.Builder
	for _, file := range slices.Sorted(maps.Keys(documents)) {
		fmt.Fprintf(&text, "%s\n", file)
		for _, f := range fieldsOf(reflect.TypeOf(documents[file])) {
			fmt.Fprintf(&text, "\t%s %s\n", f.path, f.kind)
			if !f.tagged {
				t.Errorf("%s: the field %s has no json tag with a name: tag it, so that its name in Go is free to change", file, f.path)
			}
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Error(err)
	}
	if string(want) != text.String() {
		t.Errorf("names on the disk are not those of %s, which other versions of crius read and write: undo the change. "+
			"If you only add fields, write this to the file:\n%s", golden, text.String())
	}
}

// Full reads the document testdata/file and returns it. The document must set every field of
// T, and must be the same when it is written again, byte for byte except for white space.
func Full[T any](t *testing.T, file string) *T {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	doc := new(T)
	if err := decoder.Decode(doc); err != nil {
		t.Fatalf("%s: %v: earlier versions have written that", file, err)
	}
	set := map[string]bool{}
	mark(reflect.ValueOf(doc).Elem(), "", set)
	for _, f := range fieldsOf(reflect.TypeFor[T]()) {
		if !set[f.path] {
			t.Errorf("%s: the field %s is not set: add it there, so that later versions are tested to read it", file, f.path)
		}
	}
	again, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	var was bytes.Buffer
	if err := json.Compact(&was, text); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(was.Bytes(), again) {
		t.Errorf("%s:\n%s\nbecame\n%s", file, was.Bytes(), again)
	}
	return doc
}

// Record is the document of a record.Dir.
type Record[T any] struct {
	Version int `json:"version"`
	Body    T   `json:"body"`
}

// field is a field of a document, with its path of JSON names.
type field struct {
	path, kind string
	tagged     bool
}

// fieldsOf lists the fields of a struct, each with the fields below it.
func fieldsOf(t reflect.Type) []field {
	var all []field
	for f := range t.Fields() {
		name, options, skip := nameOf(f)
		if skip {
			continue
		}
		if name == "" && f.Anonymous {
			all = append(all, fieldsOf(f.Type)...)
			continue
		}
		all = append(all, nested(field{path: cmp.Or(name, f.Name), tagged: name != ""}, f.Type, options)...)
	}
	return all
}

// nested returns the field f of type t and the fields below it.
func nested(f field, t reflect.Type, options string) []field {
	kind, inner := kindOf(t)
	if inner == nil {
		f.kind = kind + options
		return []field{f}
	}
	f.path += kind
	f.kind = "object" + options
	all := []field{f}
	for _, in := range fieldsOf(inner) {
		in.path = f.path + "." + in.path
		all = append(all, in)
	}
	return all
}

// kindOf returns the form that a type has in JSON. For a struct of crius, and for lists and
// maps of them, it returns the struct as inner and marks for the lists and maps.
func kindOf(t reflect.Type) (kind string, inner reflect.Type) {
	switch {
	case t == reflect.TypeFor[time.Time]():
		return "time", nil
	case t == reflect.TypeFor[json.RawMessage]():
		return "raw", nil
	case is[json.Marshaler](t):
		return "custom", nil
	case is[encoding.TextMarshaler](t):
		return "text", nil
	}
	switch t.Kind() {
	case reflect.Pointer:
		return kindOf(t.Elem())
	case reflect.Slice, reflect.Array:
		if t.Elem().Kind() == reflect.Uint8 {
			return "bytes", nil
		}
		return within("[]", t.Elem())
	case reflect.Map:
		return within("{}", t.Elem())
	case reflect.Struct:
		if !strings.HasPrefix(t.PkgPath(), "github.com/crius-run/crius/") {
			return t.String(), nil // the other module keeps its names
		}
		return "", t
	}
	return t.Kind().String(), nil
}

// within is kindOf for a list or map of t. The mark follows a kind but precedes the path in a
// struct.
func within(mark string, t reflect.Type) (kind string, inner reflect.Type) {
	kind, inner = kindOf(t)
	if inner == nil {
		return kind + mark, nil
	}
	return mark + kind, inner
}

func is[I any](t reflect.Type) bool {
	i := reflect.TypeFor[I]()
	return t.Kind() != reflect.Pointer && (t.Implements(i) || reflect.PointerTo(t).Implements(i))
}

// nameOf returns the name and the options in the json tag of a field. skip reports that the
// field is not part of the document.
func nameOf(f reflect.StructField) (name, options string, skip bool) {
	name, list, _ := strings.Cut(f.Tag.Get("json"), ",")
	if name == "-" || !f.IsExported() && !f.Anonymous {
		return "", "", true
	}
	if list != "" {
		options = " " + list
	}
	return name, options, false
}

// mark adds the paths of those fields of a struct to set that are not zero. In a list, one
// element that sets a field is enough.
func mark(v reflect.Value, prefix string, set map[string]bool) {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, _, skip := nameOf(f)
		switch {
		case skip:
		case name == "" && f.Anonymous:
			mark(v.Field(i), prefix, set)
		default:
			markIn(v.Field(i), prefix+cmp.Or(name, f.Name), set)
		}
	}
}

func markIn(v reflect.Value, path string, set map[string]bool) {
	if v.IsZero() {
		return
	}
	_, inner := kindOf(v.Type())
	if inner == nil {
		set[path] = true
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		markIn(v.Elem(), path, set)
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			markIn(v.Index(i), path+"[]", set)
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			markIn(v.MapIndex(key), path+"{}", set)
		}
	default:
		set[path] = true
		mark(v, path+".", set)
	}
}
