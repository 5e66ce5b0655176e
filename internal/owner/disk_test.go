package owner

import (
	"testing"

	"github.com/crius-run/crius/test/kit/disk"
)

func TestNamesOnDisk(t *testing.T) {
	disk.Names(t, map[string]any{"owner": Owner{}})
}

// A lock file that sets every field is read, and written again unchanged.
func TestOwnerWithEveryField(t *testing.T) {
	disk.Full[Owner](t, "owner-full.json")
}
