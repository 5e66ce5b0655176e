package spec

import (
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go/features"
)

func TestVersion(t *testing.T) {
	if got := ociVersion(nil); got != "1.0.2" {
		t.Errorf("unknown: %s", got)
	}
	for newest, want := range map[string]string{
		"": "1.0.2", "1.0.2-dev": "1.0.2", "1.0.0": "1.0.2", "1.1.0": "1.1.0", "1.2.0+dev": "1.2.0", "1.3.0": "1.3.0",
		"1.9.0": "1.3.0", "2.0.0": "1.3.0", "1.2": "1.0.2", "x.y.z": "1.0.2", "1.0.99999999999": "1.0.2",
	} {
		if got := ociVersion(&features.Features{OCIVersionMax: newest}); got != want {
			t.Errorf("%q: %s, want %s", newest, got, want)
		}
	}
}

func TestKernelVersion(t *testing.T) {
	for _, c := range []struct {
		release, least string
		want           bool
	}{
		{"6.1.0-13-amd64", "4.8", true}, {"4.8.0", "4.8", true}, {"4.7.99", "4.8", false}, {"4.10", "4.8", true},
		{"3.18", "4.8", false}, {"5.15-rc1", "5.15", true}, {"", "4.8", false}, {"x", "4.8", false}, {"6", "4.8", false},
	} {
		if got := (Host{Kernel: c.release}).kernelAtLeast(c.least); got != c.want {
			t.Errorf("%s at least %s: %v", c.release, c.least, got)
		}
	}
}
