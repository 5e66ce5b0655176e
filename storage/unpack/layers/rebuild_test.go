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
	from := tarsplit.Unpacker(entries{json.NewDecoder(r)})
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
