package annotation

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/crius-run/crius/oci/tuning"
)

// Requests for containers with exclusive CPUs (package tuning). They have only
// one spelling.
const (
	askInterrupts = "irq-load-balancing"
	askBalancing  = "cpu-load-balancing"
	askQuota      = "cpu-quota"
	askLatency    = "cpu-c-states"
	askGovernor   = "cpu-freq-governor"
	askShared     = "cpu-shared"
)

var governor = regexp.MustCompile(`^[a-z][a-z_]{0,14}$`) // the kernel's CPUFREQ_NAME_LEN

func (a *Asked) readTuning(name, container, value string) (err error) {
	t := &a.Tuning
	if container != "" && slices.Contains(mayNameContainer, name) {
		if a.tuning == nil {
			a.tuning = map[string]map[string]string{}
		}
		if a.tuning[container] == nil {
			a.tuning[container] = map[string]string{}
		}
		a.tuning[container][name] = value
		t = &tuning.Wishes{} // to check the value
	}
	return readWish(t, name, container, value)
}

// TuningOf returns what a container with exclusive CPUs asks for: what its pod does, except where an
// annotation names the container.
func (a Asked) TuningOf(container string) tuning.Wishes {
	wishes := a.Tuning
	for name, value := range a.tuning[container] {
		_ = readWish(&wishes, name, container, value) // Read has checked it
	}
	return wishes
}

func readWish(t *tuning.Wishes, name, container, value string) (err error) {
	switch name {
	case askInterrupts:
		if t.Housekeeping = value == "housekeeping"; t.Housekeeping {
			t.NoInterrupts = true
			return nil
		}
		t.NoInterrupts, err = parseOff(value)
	case askBalancing:
		t.NoBalancing, err = parseOff(value)
	case askQuota:
		t.NoQuota, err = parseOff(value)
	case askLatency:
		t.Latency, err = parseLatency(value)
	case askGovernor:
		if !governor.MatchString(value) {
			return invalid("%.40q is not the name of a frequency governor", value)
		}
		t.Governor = value
	case askShared:
		switch value {
		case "enable":
			t.Shared = append(t.Shared, container)
		case "disable":
		default:
			return invalid("must be enable or disable, got %.40q", value)
		}
	}
	return err
}

// parseOff reads a switch for something that is on by default. "true", from
// early versions of CRI-O, means off.
func parseOff(value string) (off bool, err error) {
	switch value {
	case "disable", "true":
		return true, nil
	case "enable", "false":
		return false, nil
	}
	return false, invalid("must be disable or enable, got %.40q", value)
}

// parseLatency returns what the kernel expects for the wake-up latency of a CPU
// (Documentation/ABI/testing/sysfs-devices-power): n/a is none, 0 is any.
func parseLatency(value string) (string, error) {
	switch value {
	case "enable":
		return "0", nil
	case "disable":
		return "n/a", nil
	}
	text, given := strings.CutPrefix(value, "max_latency:")
	if us, err := strconv.ParseInt(text, 10, 32); given && err == nil && us > 0 {
		return strconv.FormatInt(us, 10), nil
	}
	return "", invalid("must be enable, disable or max_latency:MICROSECONDS, got %.40q", value)
}
