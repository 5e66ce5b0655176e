package spec

import (
	"slices"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
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

// A bundle has a version that crius and any runtime know, whatever the runtime
// reports.
func FuzzOCIVersion(f *testing.F) {
	for _, newest := range []string{"1.2.0", "1.2.0-rc.1+dev", "65536.0.0", "1.0", "-1.0.0", "1.1.0\n", ""} {
		f.Add(newest)
	}
	f.Fuzz(func(t *testing.T, newest string) {
		got := ociVersion(&features.Features{OCIVersionMax: newest})
		if ociVersion(&features.Features{OCIVersionMax: got}) != got {
			t.Errorf("%q gives %q, and that another", newest, got)
		}
		version, ok := parseVersion(got)
		ours, _ := parseVersion(specs.Version)
		oldest, _ := parseVersion(oldestVersion)
		if !ok || slices.Compare(version, oldest) < 0 || slices.Compare(version, ours) > 0 {
			t.Errorf("%q gives %q", newest, got)
		}
	})
}

// A kernel release ends in whatever its distribution appends.
func FuzzKernelRelease(f *testing.F) {
	for _, release := range []string{"6.1.0-13-amd64", "5.15-rc1", "4", "4.", ".8", "6.x", "99999999999999999999.1", "+6.1", ""} {
		f.Add(release)
	}
	f.Fuzz(func(t *testing.T, release string) {
		numbers, err := parseKernel(release)
		if err != nil {
			if (Host{Kernel: release}).kernelAtLeast("0.0") {
				t.Errorf("%q is known to be new: %v", release, err)
			}
			return
		}
		if len(numbers) != 2 || numbers[1] < 0 || !(Host{Kernel: release}).kernelAtLeast(release) {
			t.Errorf("%q is %v", release, numbers)
		}
	})
}
