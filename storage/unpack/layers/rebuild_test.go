package layers

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"

	tarsplit "github.com/vbatts/tar-split/tar/storage"
)

// Names of files do not stay in memory while a layer is put together again.
func TestEntriesKeepNoNames(t *testing.T) { //nolint:paralleltest // measures the heap
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	const count = 2000
	r, w := io.Pipe()
	go func() {
		to := json.NewEncoder(w)
		for i := range count {
			_ = to.Encode(tarsplit.Entry{Type: tarsplit.FileType, Name: fmt.Sprint(strings.Repeat("n", 4000), i)})
		}
		_ = w.Close()
	}()
	from := tarsplit.Unpacker(newEntries(r))
	before, seen := heap(), 0
	for {
		e, err := from.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || !strings.HasSuffix(e.Name, fmt.Sprint(seen)) {
			t.Fatal(e, err)
		}
		seen++
	}
	if grew := int64(heap() - before); seen != count || grew > 500*count {
		t.Errorf("%d bytes for each of %d entries, of %d", grew/count, seen, count)
	}
	runtime.KeepAlive(from)
}

// Data that a hostile worker has written, and that decompress to one entry without end, take no memory without end.
func TestEntriesAreBounded(t *testing.T) {
	t.Parallel()
	endless := io.MultiReader(strings.NewReader(`{"type":1,"name":"`), repeating('n'))
	spaces := io.MultiReader(strings.NewReader(`{"type":1,"name":"f"}`), repeating(' '))
	for what, test := range map[string]struct {
		from    io.Reader
		entries int
	}{"a name": {endless, 0}, "nothing": {spaces, 1}} {
		from := newEntries(test.from)
		for range test.entries {
			if _, err := from.Next(); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := from.Next(); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// repeating is a byte without end.
type repeating byte

// Read implements io.Reader.
func (r repeating) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(r)
	}
	return len(p), nil
}
