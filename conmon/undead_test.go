package conmon_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/test/kit/hangfs"
	"github.com/crius-run/crius/test/kit/wait"
)

// A monitor that cannot even be killed, because it waits for a file server, is
// awaited until the caller's context ends.
func TestTerminateAnUnkillableMonitor(t *testing.T) {
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
	wait.For(t, "the process to hang", func() bool { return f.Waiting() > 0 })
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
	why := errors.New("the test is impatient")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	ended := make(chan error, 1)
	go func() { ended <- conmon.Terminate(ctx, dir) }()
	wait.For(t, "SIGKILL to be pending", func() bool { return killPending(t, process.PID) })
	select {
	case err := <-ended:
		t.Errorf("given up although the caller waits: %v", err)
	default:
	}
	cancel(why)
	if err := <-ended; !errors.Is(err, why) {
		t.Errorf("end of what cannot be killed: %v", err)
	}
	if !conmon.Alive(process) {
		t.Error("it was not so hard to kill")
	}
}

// killPending reports whether SIGKILL has been sent to a process that cannot
// handle it.
func killPending(t *testing.T, pid int) bool {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "\nShdPnd:")
	pending, err := strconv.ParseUint(strings.Fields(rest)[0], 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return pending>>(unix.SIGKILL-1)&1 == 1
}
