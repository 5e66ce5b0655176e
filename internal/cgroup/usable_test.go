package cgroup

import (
	"errors"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

func TestUsable(t *testing.T) {
	for name, c := range map[string]struct {
		driver string
		booted bool
		mode   Mode
		usable bool
	}{
		"systemd":             {"systemd", true, V2, true},
		"systemd, not booted": {"systemd", false, V2, false},
		"cgroupfs":            {"cgroupfs", false, Hybrid, true},
		"no cgroups":          {"cgroupfs", true, None, false},
	} {
		if err := usable(c.driver, c.booted, c.mode); (err == nil) != c.usable || err != nil && !errors.Is(err, fault.Unavailable) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
