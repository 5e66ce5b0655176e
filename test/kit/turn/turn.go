// Package turn has tests of several packages wait for each other where what they
// do to the machine gets in the way.
package turn

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/eintr"
)

// HideAddresses is for tests with pods whose runtime takes the addresses off
// their interfaces, as gVisor does. While there is one on the machine crius tells
// of no reserved address that it is nobody's, for it might be that pod's.
// SeeAddresses is for tests that want it told: they wait for each other, also in
// other packages and other checkouts, until the test has ended.
func HideAddresses(t *testing.T) { takeTurn(t, unix.LOCK_SH) }

// SeeAddresses is the other side of HideAddresses.
func SeeAddresses(t *testing.T) { takeTurn(t, unix.LOCK_EX) }

func takeTurn(t *testing.T, how int) {
	t.Helper()
	// Who sees the processes of the other test has this directory in common with it,
	// whichever copy of the sources they were built from.
	f, err := os.Open("/proc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := eintr.Retry(func() error { return unix.Flock(int(f.Fd()), how) }); err != nil {
		t.Fatal(err)
	}
}
