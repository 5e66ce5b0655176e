package artifact

import (
	"testing"
	"time"

	"github.com/crius-run/crius/test/kit/hangfs"
)

// A store on a network that hangs keeps nobody, and what was known of it stays known.
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
