package shim

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"
)

// The end of the input waits for what a process in a virtual machine still answers, for no other
// process, and not for ever.
func TestAwaitInput(t *testing.T) {
	const pause, look = 300 * time.Millisecond, quietTime / quietLooks
	for name, c := range map[string]struct {
		program   string
		machine   bool
		answers   int  // one after each pause
		unread    bool // in the pipe of the output
		least, up time.Duration
	}{
		"silent":                {"containerd-shim-kata-v2", true, 0, false, quietTime, quietTime},
		"answers":               {"containerd-shim-kata-v2", true, 10, false, 10*pause + quietTime, 10*pause + quietTime + look},
		"answers for ever":      {"containerd-shim-kata-v2", true, 1000, false, longestAnswer, longestAnswer + look},
		"nobody reads":          {"containerd-shim-kata-v2", true, 0, true, longestAnswer, longestAnswer + look},
		"gVisor":                {"/usr/bin/containerd-shim-runsc-v1", true, 1000, false, 0, 0},
		"process of this node":  {"containerd-shim-runc-v2", false, 1000, false, 0, 0},
		"silent for a shim too": {"/opt/kata/bin/containerd-shim-kata-v2", true, 1, false, pause + quietTime, pause + quietTime + look},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			in, err := NewFifo(filepath.Join(dir, "in"))
			if err != nil {
				t.Fatal(err)
			}
			defer in.Close()
			out, err := NewFifo(filepath.Join(dir, "out"))
			if err != nil {
				t.Fatal(err)
			}
			defer out.Close()
			if c.unread {
				if _, err := out.Write.WriteString("x"); err != nil {
					t.Fatal(err)
				}
			}
			synctest.Test(t, func(t *testing.T) {
				stop := make(chan struct{})
				defer close(stop)
				go func() {
					for i := range c.answers { // the kernel's clock for files is too coarse for pretended time
						select {
						case <-stop:
							return
						case <-time.After(pause):
						}
						at := time.Unix(int64(i), 0)
						_ = os.Chtimes(out.Path, at, at)
					}
				}()
				began := time.Now()
				r := Record{Program: c.program, Sandboxed: c.machine}
				if !r.AwaitInput(t.Context(), in.Path, out.Path) {
					t.Error("it gave up")
				}
				if took := time.Since(began); took < c.least || took > c.up {
					t.Errorf("it took %s, want %s to %s", took, c.least, c.up)
				}
			})
		})
	}
}
