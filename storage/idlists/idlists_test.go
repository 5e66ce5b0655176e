package idlists

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/crius-run/crius/storage/unpack/layers"
)

// list is one of owners, so long.
func list(n int) string { return "[" + strings.TrimSuffix(strings.Repeat("4294967295,", n), ",") + "]" }

func TestDrop(t *testing.T) {
	t.Parallel()
	long, short := list(layers.KeptOwners+1), list(layers.KeptOwners)
	for content, want := range map[string]string{
		`[{"id":"a","uidset":` + long + `,"gidset":` + long + `}]`:                   `[{"id":"a"}]`,
		`[{"uidset":` + long + `,"gidset":` + long + `,"id":"a"},{"id":"b"}]`:        `[{"id":"a"},{"id":"b"}]`,
		`[{"uidset":` + long + `},{"gidset":` + short + `,"x":[1,2]}]`:               `[{},{"x":[1,2]}]`,
		`{"body":{"r":{"f":[{"a":[],"uidset":` + long + `,"b":{"c":1,"d":",]"}}]}}}`: `{"body":{"r":{"f":[{"a":[],"b":{"c":1,"d":",]"}}]}}}`,
		" [ {\n\"id\" : \"a\" ,\n\"uidset\" : " + long + " , \"b\" : 1 } ]\n":        `[{"id":"a","b":1}]`,
		`[{"metadata":"\"uidset\":[1,2","names":["uidset"],"uidset":` + long + `}]`:  `[{"metadata":"\"uidset\":[1,2","names":["uidset"]}]`,
		`[{"id":"a", "uidset":` + long + ` } ]`:                                      `[{"id":"a"}]`,
		// These stay as they are, byte by byte.
		`[{"id" :"a","uidset":` + short + `}]`:    "",
		`[{"id" :"a","uidset":` + long + `}`:      "",
		`[{"id" :"a","uidset":` + long[:99]:       "",
		`[{"id" :"a","uidset":[[` + long + `]]}`:  "",
		`[{"id" :"a","metadata":"` + long + `"}]`: "",
		``:   "",
		`[]`: "",
	} {
		file := filepath.Join(t.TempDir(), "layers.json")
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := Drop(file); err != nil {
			t.Errorf("%.60s: %v", content, err)
		}
		got, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if want == "" {
			if string(got) != content {
				t.Errorf("%.60s became %.60s", content, got)
			}
			continue
		}
		var a, b any
		if json.Unmarshal(got, &a) != nil || json.Unmarshal([]byte(want), &b) != nil || !reflect.DeepEqual(a, b) {
			t.Errorf("%.60s became %s, want %s", content, got, want)
		}
		if left, err := os.ReadDir(filepath.Dir(file)); err != nil || len(left) != 1 {
			t.Errorf("files %v, %v", left, err)
		}
	}
	if err := Drop(filepath.Join(t.TempDir(), "none")); err != nil {
		t.Error(err)
	}
}

// A process that is killed while it writes leaves a file with the name that the library gives such
// files: the next start finds it, and the next Drop deletes it.
func TestDropKilled(t *testing.T) {
	t.Parallel()
	for _, length := range []int{layers.KeptOwners, layers.KeptOwners + 1} {
		file := filepath.Join(t.TempDir(), "layers.json")
		if err := os.WriteFile(file, []byte(`[{"uidset":`+list(length)+`}]`), 0o600); err != nil {
			t.Fatal(err)
		}
		left := temporary(file)
		if !strings.HasPrefix(filepath.Base(left), ".tmp-") {
			t.Errorf("%s is not the name of a file that is being written", left)
		}
		if err := write(file, left); err != nil {
			t.Fatal(err)
		}
		if err := Drop(file); err != nil {
			t.Error(err)
		}
		if names, err := os.ReadDir(filepath.Dir(file)); err != nil || len(names) != 1 {
			t.Errorf("left: %v, %v", names, err)
		}
	}
}

// Whatever is valid JSON stays valid, and has everything except owners.
func FuzzDrop(f *testing.F) {
	for _, s := range []string{`[{"id":"a"},{"b":[1,"x\\\"",null]}]`, ` {"uidset":[1,2],"gidset":[],"a":{"uidset":"x"}} `, `[{"uidset":[]}]`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, content string) {
		var whole any
		if json.Unmarshal([]byte(content), &whole) != nil {
			return
		}
		var to strings.Builder
		if _, err := strip(strings.NewReader(content), &to); err != nil {
			return // a list that is none of numbers
		}
		var stripped any
		if err := json.Unmarshal([]byte(to.String()), &stripped); err != nil {
			t.Fatalf("%q became %q: %v", content, to.String(), err)
		}
		if want := without(whole); !reflect.DeepEqual(stripped, want) {
			t.Fatalf("%q became %q", content, to.String())
		}
	})
}

// without takes lists of owners from a document.
func without(document any) any {
	switch d := document.(type) {
	case []any:
		for i := range d {
			d[i] = without(d[i])
		}
	case map[string]any:
		for key, value := range d {
			if _, list := value.([]any); list && (key == "uidset" || key == "gidset") {
				delete(d, key)
				continue
			}
			d[key] = without(value)
		}
	}
	return document
}
