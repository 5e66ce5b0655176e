package artifact

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/test/kit/hangfs"
)

// A store on a network that hangs delays nobody, and its known artifacts stay known.
func TestAdditionalStoreThatHangs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	fs, err := hangfs.Mount(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := fs.Release(); err != nil {
			t.Error(err)
		}
	})
	fs.Hang()
	a := &additional{dirs: []string{dir}, patience: time.Millisecond, known: map[string]*Artifact{"a": {}}}
	a.read(t.Context())
	a.read(t.Context())
	if len(a.all(t.Context())) != 1 || a.find("a") == nil {
		t.Error("artifacts are not known any more")
	}
	hanging := &Artifact{dir: dir, remote: newRemote(time.Millisecond)}
	for range cap(hanging.remote.slots) + 1 {
		if _, err := hanging.Content(t.Context(), source.Kind{}); !errors.Is(err, fault.Unavailable) {
			t.Errorf("its content: %v", err)
		}
	}
	if err := new(Store).Admit(t.Context(), nil, hanging, nil); !errors.Is(err, fault.Unavailable) {
		t.Errorf("admission: %v", err)
	}
	if _, err := hanging.document(t.Context()); !errors.Is(err, fault.Unavailable) {
		t.Errorf("its record: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	hanging.remote.patience = time.Hour
	if _, err := hanging.document(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("for a caller who has left: %v", err)
	}
	a.mu.Lock()
	done := a.reading
	a.mu.Unlock()
	if done == nil {
		t.Fatal("the store was read")
	}
	if err := fs.Release(); err != nil {
		t.Error(err)
	}
	<-done
}
