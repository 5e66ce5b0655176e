package ids

import (
	"strings"
	"testing"
)

// An id identifies its root, unless another runtime or an earlier version has
// made it.
func TestIDsNameTheirRoot(t *testing.T) {
	t.Parallel()
	a, b := Mark("/var/lib/a"), Mark("/var/lib/b/")
	seen := map[string]bool{}
	for range 1000 {
		id := New(a)
		if !Valid(id) || seen[id] {
			t.Fatalf("id %q", id)
		}
		seen[id] = true
		if OfOther(id, a) || !OfOther(id, b) {
			t.Errorf("%s: other than its root %t, than another %t", id, OfOther(id, a), OfOther(id, b))
		}
		if plain := Unmarked(); OfOther(plain, a) || OfOther(plain, b) {
			t.Errorf("%s is taken for another server's", plain)
		}
	}
	if Mark("/var/lib/b") != b {
		t.Error("a slash makes another root")
	}
}

func TestValid(t *testing.T) {
	id := Unmarked()
	for id, want := range map[string]bool{
		id:                        true,
		"":                        false,
		id[1:]:                    false,
		id + "0":                  false,
		strings.Repeat("A", 64):   false,
		"../" + id[3:]:            false,
		strings.Repeat("g", 64):   false,
		strings.Repeat("f\n", 32): false,
	} {
		if Valid(id) != want {
			t.Errorf("Valid(%q) = %t", id, !want)
		}
	}
}
