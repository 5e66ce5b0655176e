package stop

import (
	"testing"
	"time"

	"github.com/crius-run/crius/conmon/wire"
)

// The monitor of a killed container is not taken for one that hangs while it waits for output: with it
// the exit code would be lost, and what the container has written last.
func TestMonitorsMayWaitForOutput(t *testing.T) {
	t.Parallel()
	if most := wire.OutputTime * time.Millisecond; most >= killAgain {
		t.Errorf("a monitor may wait for %s and is killed after %s", most, killAgain)
	}
}
