package durable

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

type layerRecord struct {
	ID    string
	Flags map[string]any
}

// A record file passes exactly if the library can read it as a list without loops, and one that
// does not is moved aside whole, with a list in its place.
func FuzzRecordFile(f *testing.F) {
	for _, text := range []string{`[{"id":"a"}]`, "[]", "", "null", `[{"id":"a","parent":"a"}]`, "\x00\x00", `[{"id":"a"}`, `{"0":[]}`, " [] x"} {
		f.Add([]byte(text), []byte(`[{"id":"b","flags":{"incomplete":true}}]`))
	}
	f.Add([]byte("["), []byte("{}"))
	f.Fuzz(func(t *testing.T, text, sealed []byte) {
		root := t.TempDir()
		path := filepath.Join(root, layersFile)
		if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		last := &manifest{Records: map[string]json.RawMessage{layersFile: sealed}}
		if !json.Valid(sealed) {
			last = nil
		}
		var records []layerRecord
		_ = json.Unmarshal(sealed, &records)
		for id := range last.layers() {
			if !slices.ContainsFunc(records, func(r layerRecord) bool { return r.ID == id && r.Flags["incomplete"] == nil }) {
				t.Errorf("%s vouches for %s", sealed, id)
			}
		}
		var list []json.RawMessage
		wrong := json.Unmarshal(text, &list) != nil || looped(text) != nil
		if err := (Roots{Graph: root}).checkRecords(last); err != nil {
			t.Fatal(err)
		}
		now, err := os.ReadFile(path)
		if err != nil || json.Unmarshal(now, &list) != nil || looped(now) != nil || !wrong && !bytes.Equal(now, text) {
			t.Errorf("%q became %q, %v", text, now, err)
		}
		kept, err := os.ReadFile(path + DamagedSuffix)
		if wrong != (err == nil) || wrong && !bytes.Equal(kept, text) {
			t.Errorf("%q was kept as %q, %v", text, kept, err)
		}
	})
}
