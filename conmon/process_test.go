package conmon_test

import (
	"errors"
	"os"
	"testing"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

func TestOpenPIDNamespace(t *testing.T) {
	t.Parallel()
	self, err := wire.Find(os.Getpid())
	must(err)
	file, err := conmon.OpenPIDNamespace(self)
	must(err)
	defer file.Close()
	own, err := os.Stat("/proc/self/ns/pid")
	must(err)
	opened, err := file.Stat()
	must(err)
	if !os.SameFile(own, opened) {
		t.Errorf("%s is not this process's PID namespace", file.Name())
	}

	earlier := conmon.Process{PID: self.PID, StartTime: self.StartTime - 1}
	for _, p := range []conmon.Process{earlier, {PID: 1 << 30}, {}} {
		if _, err := conmon.OpenPIDNamespace(p); !errors.Is(err, fault.Precondition) {
			t.Errorf("of %+v, which has ended: %v, want fault.Precondition", p, err)
		}
	}
}
