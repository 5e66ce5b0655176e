package pod

import (
	"testing"

	"github.com/crius-run/crius/internal/record"
)

// An id says whose it is; one that another runtime or an earlier version has made
// says nothing.
func TestIDsNameTheirRoot(t *testing.T) {
	t.Parallel()
	a, b := mark("/var/lib/a"), mark("/var/lib/b/")
	seen := map[string]bool{}
	for range 1000 {
		id := markedID(a)
		if !record.ValidID(id) || seen[id] {
			t.Fatalf("id %q", id)
		}
		seen[id] = true
		if isOthers(id, a) || !isOthers(id, b) {
			t.Errorf("%s: other than its root %t, than another %t", id, isOthers(id, a), isOthers(id, b))
		}
		if plain := newID(); isOthers(plain, a) || isOthers(plain, b) {
			t.Errorf("%s is taken for another server's", plain)
		}
	}
	if mark("/var/lib/b") != b {
		t.Error("a slash makes another root")
	}
}
