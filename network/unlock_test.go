package network

import (
	"fmt"
	"testing"
)

// Only criu's tables are removed.
func TestLocks(t *testing.T) {
	t.Parallel()
	got := fmt.Sprint(locks("table ip nat\ntable inet CRIU-b1d4355a\ntable ip CRIUS\ntable inet mine\ntable ip CRIU\n\n"))
	if want := "[[table inet CRIU-b1d4355a] [table ip CRIU]]"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
