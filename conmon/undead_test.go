package conmon_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/testkit/hangfs"
)

// A monitor that cannot even be killed, since it waits for a file server, is not
// waited for longer than the caller does.
func TestTerminateAnUndeadMonitor(t *testing.T) {
	t.Parallel()
	f, err := hangfs.Mount(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	undead := exec.Command("stat", filepath.Join(f.Dir, "file"))
	if err := undead.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Release(); err != nil {
			t.Error(err)
		}
		_ = undead.Wait() // killed
	})
	eventually(t, "it to hang", func() bool { return f.Waiting() > 0 })
	process, err := wire.Find(undead.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	known, err := json.Marshal(conmon.Processes{Monitor: process})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, wire.Processes), known, 0o600); err != nil {
		t.Fatal(err)
	}
	const limit = time.Second
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if err := conmon.Terminate(ctx, dir); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("end of what cannot be killed: %v", err)
	}
	if took := time.Since(began); took < limit || took > limit+time.Minute {
		t.Errorf("took %v", took)
	}
	if !conmon.Alive(process) {
		t.Error("it was not so hard to kill")
	}
}
