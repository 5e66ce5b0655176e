package tuning

import (
	"testing"

	"github.com/crius-run/crius/test/kit/disk"
)

func TestNamesOnDisk(t *testing.T) {
	disk.Names(t, map[string]any{"tuning.json": changes{}})
}

// A record that sets every field is read, and written again unchanged.
func TestRecordWithEveryField(t *testing.T) {
	if doc := disk.Full[disk.Record[changes]](t, "tuning-full.json"); doc.Version != version {
		t.Errorf("version %d", doc.Version)
	}
}
