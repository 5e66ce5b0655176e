package cgroup

import (
	"context"
	"errors"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

func TestBelow(t *testing.T) {
	own, err := Own()
	if err != nil {
		t.Fatal(err)
	}
	parent := path.Join(own, scratchTop)
	top := parent + "/find"
	t.Cleanup(func() {
		err := Remove(context.Background(), top)
		if parent != scratchTop { // which others use, too
			err = errors.Join(err, Remove(context.Background(), parent))
		}
		if err != nil {
			t.Error(err)
		}
	})
	for _, name := range []string{"a/x-1/x-2", "x-3", "b/c"} {
		if err := Make(top + "/" + name); err != nil {
			t.Fatal(err)
		}
	}
	fits := func(name string) bool { return strings.HasPrefix(name, "x-") }
	want := []string{top + "/a/x-1", top + "/x-3"} // and not what is below the first
	if found, err := Below(top, fits); err != nil || !slices.Equal(found, want) {
		t.Errorf("%q, %v", found, err)
	}
	if found, err := Below(top+"/nothing", fits); err != nil || len(found) > 0 {
		t.Errorf("%q, %v", found, err)
	}
	if _, err := Below("/", fits); !errors.Is(err, fault.Invalid) {
		t.Errorf("the root: %v", err)
	}
	for name, want := range map[string]bool{"/a/x-1/x-2": true, "/a/x-2": false} {
		if there, err := Exists(top + name); err != nil || there != want {
			t.Errorf("%s: %t, %v", name, there, err)
		}
	}
}
