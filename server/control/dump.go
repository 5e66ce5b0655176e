package control

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"runtime/pprof"
)

// maxDump bounds a dump, for the server and the client.
const maxDump = 32 << 20

// Goroutines returns the stacks of all goroutines as text, each with how long
// it has waited. It stops the program for milliseconds.
func Goroutines() []byte { return goroutines(64<<10, maxDump) }

func goroutines(first, most int) []byte {
	const cut = "\n[cut off: more stacks than fit]\n"
	for size := first; ; size *= 2 {
		stacks := make([]byte, min(size, most))
		switch n := runtime.Stack(stacks, true); {
		case n < len(stacks):
			return stacks[:n]
		case size >= most:
			return append(stacks[:len(stacks)-len(cut)], cut...)
		}
	}
}

// heap returns the heap profile in the format of go tool pprof.
func heap() ([]byte, error) {
	var b bytes.Buffer
	err := pprof.Lookup("heap").WriteTo(&b, 0)
	return b.Bytes(), err
}

// dumps are the dumps that a server offers, by path.
var dumps = map[string]func() ([]byte, error){
	goroutinesPath: func() ([]byte, error) { return Goroutines(), nil },
	heapPath:       heap,
}

func serveDumps(mux *http.ServeMux) {
	for path, dump := range dumps {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			data, err := dump()
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			w.Header().Set("Content-Type", "application/octet-stream")
			_, _ = w.Write(data) // the client sees the end of the connection
		})
	}
}

// copyDump refuses more than maxDump.
func copyDump(w io.Writer, r io.Reader) error {
	n, err := io.Copy(w, io.LimitReader(r, maxDump+1))
	if err == nil && n > maxDump {
		err = fmt.Errorf("dump is larger than %d bytes", maxDump)
	}
	return err
}
