package durable

import (
	"testing"

	"github.com/crius-run/crius/test/kit/disk"
)

func TestNamesOnDisk(t *testing.T) {
	disk.Names(t, map[string]any{manifestName: manifest{}})
}

// A manifest that sets every field is read, and written again unchanged.
func TestManifestWithEveryField(t *testing.T) {
	doc := disk.Full[disk.Record[manifest]](t, "seal-full.json")
	if layers := doc.Body.layers(); doc.Version != manifestVersion || len(layers) != 2 {
		t.Errorf("version %d, layers %v", doc.Version, layers)
	}
}
