package annotation

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/tuning"
)

// allTuning are the annotations for CPUs, as OpenShift allows them.
var allTuning = []string{"irq-load-balancing.crio.io", "cpu-load-balancing.crio.io", "cpu-quota.crio.io", "cpu-c-states.crio.io", "cpu-freq-governor.crio.io", "cpu-shared.crio.io"}

func TestReadTuning(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		key, value string
		want       tuning.Wishes
	}{
		{"irq-load-balancing.crio.io", "disable", tuning.Wishes{NoInterrupts: true}},
		{"irq-load-balancing.crio.io", "true", tuning.Wishes{NoInterrupts: true}},
		{"irq-load-balancing.crio.io", "housekeeping", tuning.Wishes{NoInterrupts: true, Housekeeping: true}},
		{"irq-load-balancing.crio.io", "enable", tuning.Wishes{}},
		{"cpu-load-balancing.crio.io", "disable", tuning.Wishes{NoBalancing: true}},
		{"cpu-quota.crio.io", " disable ", tuning.Wishes{NoQuota: true}},
		{"cpu-quota.crio.io", "false", tuning.Wishes{}},
		{"cpu-c-states.crio.io", "disable", tuning.Wishes{Latency: "n/a"}},
		{"cpu-c-states.crio.io", "enable", tuning.Wishes{Latency: "0"}},
		{"cpu-c-states.crio.io", "max_latency:10", tuning.Wishes{Latency: "10"}},
		{"cpu-freq-governor.crio.io", "performance", tuning.Wishes{Governor: "performance"}},
		{"cpu-shared.crio.io/app", "enable", tuning.Wishes{Shared: []string{"app"}}},
		{"cpu-shared.crio.io/app", "disable", tuning.Wishes{}},
	} {
		a, err := Read(map[string]string{c.key: c.value}, Rules{Allowed: allTuning})
		if err != nil || !reflect.DeepEqual(a.Tuning, c.want) || len(a.Ignored) > 0 {
			t.Errorf("%s=%s: %+v, %v, ignored %q; want %+v", c.key, c.value, a.Tuning, err, a.Ignored, c.want)
		}
		a, err = Read(map[string]string{c.key: c.value}, Rules{Allowed: []string{"*", "*.crio.io"}})
		if err != nil || a.Tuning.Any() || len(a.Ignored) != 1 {
			t.Errorf("%s=%s, allowed by a pattern: %+v, %v, ignored %q", c.key, c.value, a.Tuning, err, a.Ignored)
		}
	}
	a, err := Read(map[string]string{"cpu-c-states.crio.io/app": "disable", "cpu-shared.crio.io": "enable"}, Rules{Allowed: allTuning})
	if err != nil || a.Tuning.Any() || len(a.Ignored) != 2 {
		t.Errorf("keys that name a container, and do not: %+v, %v", a, err)
	}
}

func TestTuningRefusesNonsense(t *testing.T) {
	t.Parallel()
	for _, c := range [][2]string{
		{"irq-load-balancing.crio.io", ""}, {"cpu-load-balancing.crio.io", "housekeeping"}, {"cpu-quota.crio.io", "off"},
		{"cpu-c-states.crio.io", "10"}, {"cpu-c-states.crio.io", "max_latency:0"}, {"cpu-c-states.crio.io", "max_latency:-1"},
		{"cpu-c-states.crio.io", "max_latency:99999999999"}, {"cpu-c-states.crio.io", "n/a"},
		{"cpu-freq-governor.crio.io", ""}, {"cpu-freq-governor.crio.io", "../x"}, {"cpu-freq-governor.crio.io", "performance x"},
		{"cpu-shared.crio.io/app", "true"},
	} {
		_, err := Read(map[string]string{c[0]: c[1]}, Rules{Allowed: allTuning})
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), c[0]) {
			t.Errorf("%s=%q: %v", c[0], c[1], err)
		}
	}
}

// A container's own annotation comes before its pod's (cri-o#9989).
func TestTuningOfOneContainer(t *testing.T) {
	t.Parallel()
	allowed := Rules{Allowed: []string{"cpu-quota.crio.io", "cpu-load-balancing.crio.io", "irq-load-balancing.crio.io"}}
	a, err := Read(map[string]string{
		"cpu-quota.crio.io": "disable", "cpu-quota.crio.io/kept": "enable",
		"cpu-load-balancing.crio.io/alone": "disable",
		"irq-load-balancing.crio.io":       "housekeeping", "irq-load-balancing.crio.io/alone": "disable", "irq-load-balancing.crio.io/kept": "enable",
	}, allowed)
	if err != nil || len(a.Ignored) > 0 {
		t.Fatalf("%v, ignored %q", err, a.Ignored)
	}
	for container, want := range map[string]tuning.Wishes{
		"kept":  {},
		"alone": {NoQuota: true, NoBalancing: true, NoInterrupts: true},
		"other": {NoQuota: true, NoInterrupts: true, Housekeeping: true},
	} {
		if got := a.TuningOf(container); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", container, got, want)
		}
	}
	if _, err := Read(map[string]string{"cpu-quota.crio.io/c": "perhaps"}, allowed); !errors.Is(err, fault.Invalid) {
		t.Errorf("a value that makes no sense: %v", err)
	}
	if a, err := Read(map[string]string{"cpu-quota.crio.io/c": "disable"}, Rules{}); err != nil || a.TuningOf("c").Any() || len(a.Ignored) != 1 {
		t.Errorf("not allowed: %+v, %v", a, err)
	}
}
