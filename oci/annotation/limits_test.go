package annotation

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

const ownLayerSize = "writable-layer-size.crius.run"

func TestLayerSize(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		annotations map[string]string
		app, other  int64
	}{
		{nil, 0, 0},
		{map[string]string{LayerSizeKey: "33554432"}, 32 << 20, 32 << 20},
		{map[string]string{LayerSizeKey: " 10Gi "}, 10 << 30, 10 << 30},
		{map[string]string{ownLayerSize: "1G"}, 1e9, 1e9},
		{map[string]string{ownLayerSize + "/app": "1Gi"}, 1 << 30, 0},
		{map[string]string{ownLayerSize + "/app": "1Gi", LayerSizeKey: "2Gi"}, 1 << 30, 2 << 30},
		{map[string]string{ownLayerSize + "/app": "3Gi", ownLayerSize: "2Gi"}, 3 << 30, 2 << 30},
		{map[string]string{ownLayerSize: "1Gi", LayerSizeKey: "1073741824"}, 1 << 30, 1 << 30}, // they agree
		{map[string]string{ownLayerSize: "1048576"}, 1 << 20, 1 << 20},
		{map[string]string{ownLayerSize: "1048576Ti"}, 1 << 60, 1 << 60},
	} {
		for _, allowed := range []string{LayerSizeKey, ownLayerSize} { // each allows both
			a, err := Read(c.annotations, Rules{Allowed: []string{allowed}})
			if err != nil || a.LayerSize("app") != c.app || a.LayerSize("other") != c.other || len(a.Ignored) > 0 {
				t.Errorf("%v, allowed by %s: %d and %d, ignored %q, %v", c.annotations, allowed, a.LayerSize("app"), a.LayerSize("other"), a.Ignored, err)
			}
		}
	}
}

func TestBadLayerSizesAreRefused(t *testing.T) {
	t.Parallel()
	for _, value := range []string{
		"", " ", "0", "-1", "-1Gi", "+", "1e3", "1e9", "1.5Gi", "10 Gi", "10GiB", "10gi", "Gi", "0x100000", "1_048_576", "1048575", "1023Ki",
		"1048577Ti", "9223372036854775807", "9223372036854775808", "99999999999999999999Ti", "1Ei", "NaN", "max", "10Gi\n5Gi", "１０Gi", "10Gi,20Gi",
	} {
		for _, key := range []string{LayerSizeKey, ownLayerSize, ownLayerSize + "/app"} {
			if _, err := Read(map[string]string{key: value}, Rules{Allowed: []string{LayerSizeKey}}); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "annotation "+key+": ") {
				t.Errorf("%s=%q: %v", key, value, err)
			}
			if a, err := Read(map[string]string{key: value}, Rules{Allowed: []string{"*", "containerd.io/*", "*.crius.run"}}); err != nil || len(a.Ignored) != 1 || a.LayerSize("app") != 0 {
				t.Errorf("%s=%q, which is not allowed: %+v, %v", key, value, a, err)
			}
		}
	}
	_, err := Read(map[string]string{LayerSizeKey: "1Gi", ownLayerSize: "2Gi"}, Rules{Allowed: []string{LayerSizeKey}})
	if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), LayerSizeKey) || !strings.Contains(err.Error(), ownLayerSize) {
		t.Errorf("two keys that contradict each other: %v", err)
	}
}

func TestUlimits(t *testing.T) {
	t.Parallel()
	rules := Rules{Allowed: []string{"ulimits.crius.run"}, Ulimits: []string{"nofile=4096", "core=unlimited", "nproc=100:200"}}
	for _, c := range []struct {
		annotations map[string]string
		app, other  string
	}{
		{nil, "[]", "[]"},
		{map[string]string{"ulimits.crius.run": "nofile=1024:4096"}, "[{RLIMIT_NOFILE 4096 1024}]", "[{RLIMIT_NOFILE 4096 1024}]"},
		{map[string]string{"ulimits.crius.run": " core=-1 , nofile=7 "}, "[{RLIMIT_CORE 18446744073709551615 18446744073709551615} {RLIMIT_NOFILE 7 7}]", "[{RLIMIT_CORE 18446744073709551615 18446744073709551615} {RLIMIT_NOFILE 7 7}]"},
		{map[string]string{"ulimits.crius.run/app": "nofile=8", "ulimits.crius.run": "core=0,nofile=9"}, "[{RLIMIT_CORE 0 0} {RLIMIT_NOFILE 8 8}]", "[{RLIMIT_CORE 0 0} {RLIMIT_NOFILE 9 9}]"},
		{map[string]string{"ulimits.crius.run/app": "nproc=200"}, "[{RLIMIT_NPROC 200 200}]", "[]"},
	} {
		a, err := Read(c.annotations, rules)
		if app, other := fmt.Sprint(a.Ulimits("app")), fmt.Sprint(a.Ulimits("other")); err != nil || app != c.app || other != c.other {
			t.Errorf("%v: %s and %s, %v", c.annotations, app, other, err)
		}
	}
	for value, kind := range map[string]error{
		"": fault.Invalid, ",": fault.Invalid, "nofile": fault.Invalid, "nofile=": fault.Invalid, "nofile=-2": fault.Invalid, "nofile=1e3": fault.Invalid,
		"nofile=2:1": fault.Invalid, "nofile=1:2:3": fault.Invalid, "nofile=1Ki": fault.Invalid, "NOFILE=1": fault.Invalid, "RLIMIT_NOFILE=1": fault.Invalid,
		"nofile=1,nofile=1": fault.Invalid, "nofile=18446744073709551616": fault.Invalid, "nofile=1,": fault.Invalid, "nofile =1": fault.Invalid,
		"nofile=4097": fault.Denied, "nofile=1:4097": fault.Denied, "nofile=unlimited": fault.Denied, "memlock=0": fault.Denied, "nproc=201": fault.Denied,
		"core=1,rtprio=99": fault.Denied,
	} {
		if _, err := Read(map[string]string{"ulimits.crius.run": value}, rules); !errors.Is(err, kind) {
			t.Errorf("%q: %v, want %v", value, err, kind)
		}
	}
}

// Crius's own requests have one domain, and CRI-O's have theirs.
func TestOwnRequestsHaveTheirOwnDomain(t *testing.T) {
	t.Parallel()
	for _, key := range []string{
		"ulimits.crio.io", "ulimits.crius.run.crio.io", "shm-size.crius.run", "ulimit.crius.run", "ulimits.crius.run.crius.run",
		"io.kubernetes.cri-o.ulimits", "containerd.io/snapshot/max-size/app", "containerd.io/snapshot/other",
	} {
		a, err := Read(map[string]string{key: "1Gi"}, Rules{Allowed: []string{key, LayerSizeKey, "ulimits.crius.run", "shm-size.crio.io"}})
		if err != nil || a.ShmSize != 0 || a.LayerSize("app") != 0 || len(a.Ulimits("app")) > 0 {
			t.Errorf("%s acts: %+v, %v", key, a, err)
		}
	}
}
