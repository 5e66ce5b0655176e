package shim

import (
	"testing"

	"github.com/crius-run/crius/test/kit/disk"
)

func TestNamesOnDisk(t *testing.T) {
	disk.Names(t, map[string]any{recordFile: Record{}})
}

// A record that sets every field is read, and written again unchanged.
func TestRecordWithEveryField(t *testing.T) {
	disk.Full[Record](t, "shim-full.json")
}
