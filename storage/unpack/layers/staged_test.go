package layers

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

// A layer whose directory another program has deleted meanwhile is unpacked again, whatever looked
// wrong with it, such as a hard link to a file that was there; and so is one that seems whole.
func TestSweptLayerIsNotToBlame(t *testing.T) {
	t.Parallel()
	staging := Staging{Dir: t.TempDir()}
	lock := filepath.Join(staging.Dir, StagingLock)
	if err := os.WriteFile(lock, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	invalid := fmt.Errorf("a hard link to nothing: %w", fault.Invalid)
	for _, err := range []error{nil, invalid} {
		if got := staging.swept(err); !errors.Is(got, err) || swept(got) {
			t.Errorf("%v became %v", err, got)
		}
	}
	if err := os.Remove(lock); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{nil, invalid} {
		if got := staging.swept(err); !swept(got) || errors.Is(got, fault.Invalid) {
			t.Errorf("%v became %v", err, got)
		}
	}
}

// emptyStore has no layers, and takes none.
type emptyStore struct{}

func (emptyStore) Has(string) (bool, error)        { return false, nil }
func (emptyStore) Dirs(string) ([]string, error)   { return nil, errors.New("no layers") }
func (emptyStore) Add([]Unpacked) ([]Place, error) { return nil, errors.New("no room") }

// The store is asked only for the directories of layers that it has had before.
func TestStackGrows(t *testing.T) {
	t.Parallel()
	s := stack{store: emptyStore{}}
	s.grow("", "a", "/a")
	s.grow("a", "b", "/b")
	if dirs, err := s.of("b"); err != nil || !slices.Equal(dirs, []string{"/b", "/a"}) {
		t.Errorf("%q, %v", dirs, err)
	}
	s.grow("other", "c", "/c")
	for _, unknown := range []string{"a", "c", "other"} {
		if dirs, err := s.of(unknown); err == nil {
			t.Errorf("%s: %q without the store", unknown, dirs)
		}
	}
}
