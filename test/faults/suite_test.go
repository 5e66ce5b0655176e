// Package faults tests that crius survives a failing environment: full disks,
// file servers that do not answer, locks held by other programs, runtimes and
// plugins that hang. Each fault has bounded effects, yields an error that names
// its cause, and affects nothing else: see prober.
package faults

import (
	"flag"
	"os"
	"testing"

	"github.com/crius-run/crius/test/scene"
)

func TestMain(m *testing.M) {
	flag.Set("test.parallel", "6") // a test mostly waits
	os.Exit(scene.Run(m))
}
