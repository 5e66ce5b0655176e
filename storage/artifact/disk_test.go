package artifact

import (
	"testing"

	"github.com/crius-run/crius/test/kit/disk"
)

func TestNamesOnDisk(t *testing.T) {
	disk.Names(t, map[string]any{recordName: document{}})
}

// A record that sets every field is read, and written again unchanged.
func TestRecordWithEveryField(t *testing.T) {
	disk.Full[document](t, "record-full.json")
}
