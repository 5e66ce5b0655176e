package record

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

// Whatever a power cut does to a document and its predecessor, one of the two
// is read in full or the id is reported as damaged, and All preserves that.
func FuzzRecord(f *testing.F) {
	const one, two = `{"version":1,"body":{"Name":"one"}}`, `{"version":1,"body":{"Name":"two","Count":2,"Data":"eA=="}}`
	f.Add([]byte(two), []byte(one), true)
	f.Add([]byte(two[:20]), []byte(one), true)
	f.Add([]byte("\x00\x00\x00"), []byte("\x00"), true)
	f.Add([]byte(""), []byte(""), false)
	f.Add([]byte(`{"version":2,"body":{}}`), []byte(one), true)
	f.Add([]byte(`{"version":1,"body":null}`), []byte(`{"version":1}`), true)
	log := slog.Default()
	slog.SetDefault(slog.New(slog.DiscardHandler)) // it would be logged each time
	f.Cleanup(func() { slog.SetDefault(log) })
	f.Fuzz(func(t *testing.T, text, last []byte, hasLast bool) {
		root := t.TempDir()
		d := open(t, root)
		path := filepath.Join(root, id(1), "doc.json")
		err := errors.Join(os.Mkdir(filepath.Dir(path), 0o700), os.WriteFile(path, text, 0o600))
		if hasLast {
			err = errors.Join(err, os.WriteFile(path+lastSuffix, last, 0o600))
		}
		if err != nil {
			t.Fatal(err)
		}
		want, getErr := d.Get(id(1))
		if errors.Is(getErr, fault.NotFound) || (want == nil) != (getErr != nil) {
			t.Fatalf("%q, %q: %+v, %v", text, last, want, getErr)
		}
		docs, _, damaged, err := d.Read()
		if err != nil || !reflect.DeepEqual(docs[id(1)], want) || len(damaged) == 1 != (want == nil) {
			t.Errorf("%q, %q: read %+v, damaged %+v, %v", text, last, docs, damaged, err)
		}
		docs, orphans, damaged, err := d.All()
		if err != nil || !reflect.DeepEqual(docs[id(1)], want) || len(damaged)+len(docs) != 1 || len(orphans) != len(damaged) {
			t.Fatalf("%q, %q: %+v, orphans %q, damaged %+v, %v", text, last, docs, orphans, damaged, err)
		}
		if len(damaged) == 1 {
			if kept, err := os.ReadFile(damaged[0].File); err != nil || string(kept) != string(text) {
				t.Errorf("%q was kept as %q, %v", text, kept, err)
			}
		}
		if err := d.Sync(); err != nil {
			t.Fatal(err)
		}
		if again, err := d.Get(id(1)); !reflect.DeepEqual(again, want) || want == nil && !errors.Is(err, fault.NotFound) {
			t.Errorf("%q, %q: %+v became %+v, %v", text, last, want, again, err)
		}
	})
}
