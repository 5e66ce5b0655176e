package wire

import (
	"testing"

	"github.com/crius-run/crius/test/kit/disk"
)

// Server and worker may be of different packages while one is being upgraded: a change of
// these names needs another Protocol.
func TestNamesOnTheWire(t *testing.T) {
	disk.Names(t, map[string]any{"order": Order{}, "message": Message{}, "question": Question{}, "answer": Answer{}})
}
