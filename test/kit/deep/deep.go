// Package deep makes directories that are nested deeper than a process can have files open.
package deep

import (
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	levels   = 1000 // that Nest makes
	files    = 200  // that the process of Alone can have open
	variable = "CRIUS_TEST_DEEP"
)

// Alone runs the test once more in a process that can have few files open, and reports whether this is that process.
func Alone(t *testing.T) bool {
	t.Helper()
	if os.Getenv(variable) != "" {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: files}); err != nil {
			t.Fatal(err)
		}
		return true
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), variable+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%.4000s", err, out)
	}
	return false
}

// Nest nests directories below one.
func Nest(t *testing.T, dir string) {
	t.Helper()
	at, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	for i := 0; i < levels && err == nil; i++ {
		above := at
		if err = unix.Mkdirat(above, "d", 0o700); err == nil {
			at, err = unix.Openat(above, "d", unix.O_PATH|unix.O_CLOEXEC, 0)
		}
		_ = unix.Close(above)
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(at)
}
