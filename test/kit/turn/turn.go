// Package turn makes tests of several packages wait for each other when their
// effects on the machine conflict.
package turn

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/eintr"
)

// HideAddresses is for tests with pods whose runtime takes the addresses off
// their interfaces, as gVisor does. While such a pod exists on the machine
// crius reports no reserved address as unused, because it might be that pod's.
// SeeAddresses is for tests that need such a report. The two wait for each
// other, also across packages and checkouts, until the test has ended.
func HideAddresses(t *testing.T) { takeTurn(t, unix.LOCK_SH) }

// SeeAddresses is the counterpart of HideAddresses.
func SeeAddresses(t *testing.T) { takeTurn(t, unix.LOCK_EX) }

func takeTurn(t *testing.T, how int) {
	t.Helper()
	// Tests that see each other's processes share this directory, whichever copy
	// of the sources they were built from.
	f, err := os.Open("/proc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := eintr.Retry(func() error { return unix.Flock(int(f.Fd()), how) }); err != nil {
		t.Fatal(err)
	}
}
