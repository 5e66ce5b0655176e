package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"runtime/pprof"
	"strconv"
	"time"

	"github.com/crius-run/crius/internal/fault"
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

// MaxCPUProfile is the longest time for which a CPU profile is taken.
const MaxCPUProfile = 10 * time.Minute

// errProfiling means that a CPU profile is being taken: there can be one at a time.
var errProfiling = errors.New("cannot take a CPU profile, another one is being taken: try again when it is done")

// cpu takes a CPU profile for that time, or until ctx ends: what there is by then counts.
func cpu(ctx context.Context, during time.Duration) ([]byte, error) {
	var b bytes.Buffer
	if err := pprof.StartCPUProfile(&b); err != nil {
		return nil, fmt.Errorf("%w: %w", errProfiling, err)
	}
	timer := time.NewTimer(during)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	pprof.StopCPUProfile()
	return b.Bytes(), nil
}

func serveCPU(w http.ResponseWriter, r *http.Request) {
	seconds, err := strconv.ParseUint(r.FormValue(secondsKey), 10, 16)
	during := time.Duration(seconds) * time.Second
	if err != nil || during == 0 || during > MaxCPUProfile {
		http.Error(w, fmt.Sprintf("%s must be a number from 1 to %d", secondsKey, int(MaxCPUProfile.Seconds())), http.StatusBadRequest)
		return
	}
	data, err := cpu(r.Context(), during)
	writeDump(w, data, err)
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
			writeDump(w, data, err)
		})
	}
	mux.HandleFunc("GET "+cpuPath, serveCPU)
}

func writeDump(w http.ResponseWriter, data []byte, err error) {
	if err != nil {
		http.Error(w, fault.Text(err), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	_, _ = w.Write(data) // the client sees the end of the connection
}

// copyDump refuses more than maxDump.
func copyDump(w io.Writer, r io.Reader) error {
	n, err := io.Copy(w, io.LimitReader(r, maxDump+1))
	if err == nil && n > maxDump {
		err = fmt.Errorf("dump is larger than %d bytes", maxDump)
	}
	return err
}
