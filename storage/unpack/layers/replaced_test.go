package layers

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"testing"

	tarsplit "github.com/vbatts/tar-split/tar/storage"
)

// A directory that has several entries is still there with all that is in it.
func TestReplaced(t *testing.T) {
	t.Parallel()
	type entry struct {
		name string
		kind byte
		size int64
	}
	for want, archive := range map[string][]entry{
		"":   {{"a/", tar.TypeDir, 0}, {"a/f", tar.TypeReg, 1}, {"a", tar.TypeDir, 0}, {"./a/", tar.TypeDir, 0}, {"b", tar.TypeReg, 0}, {"b", tar.TypeReg, 1}},
		"/f": {{"f", tar.TypeReg, 1}, {"./f", tar.TypeReg, 1}},
		"/d": {{"d", tar.TypeReg, 1}, {"d/", tar.TypeDir, 0}},
		"/a": {{"a/b/c/f", tar.TypeReg, 1}, {"a/b/g", tar.TypeReg, 1}, {"a", tar.TypeSymlink, 0}},
	} {
		var description bytes.Buffer
		to := json.NewEncoder(&description)
		for _, e := range archive {
			header := make([]byte, 3*headerSize) // with padding before it
			header[2*headerSize+headerType] = e.kind
			for _, part := range []tarsplit.Entry{{Type: tarsplit.SegmentType, Payload: header}, {Type: tarsplit.FileType, Name: e.name, Size: e.size}} {
				if err := to.Encode(part); err != nil {
					t.Fatal(err)
				}
			}
		}
		if got, err := replaced(newEntries(&description)); got != want || err != nil {
			t.Errorf("got %q, %v, want %q", got, err, want)
		}
	}
}
