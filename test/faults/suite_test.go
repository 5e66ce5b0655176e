// Package faults holds the promises about surroundings that fail: disks that
// are full, file servers that do not answer, locks that others hold, runtimes
// and plugins that hang. Each fault ends in a bound, with an error that names
// its cause, and is nobody else's: see prober.
package faults

import (
	"flag"
	"os"
	"testing"

	"github.com/crius-run/crius/test/scene"
)

func TestMain(m *testing.M) {
	flag.Set("test.parallel", "6") // much of the time is waiting
	os.Exit(scene.Run(m))
}
