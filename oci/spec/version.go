package spec

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
)

// oldestVersion is for a runtime that does not report its features: crun up to
// 1.8 refuses anything but 1.0.x.
const oldestVersion = "1.0.2"

// ociVersion returns the newest version that both the runtime and this package
// know.
func ociVersion(f *features.Features) string {
	if f == nil {
		return oldestVersion
	}
	newest, ok := parseVersion(f.OCIVersionMax)
	if !ok {
		return oldestVersion
	}
	floor, _ := parseVersion(oldestVersion)
	ours, _ := parseVersion(specs.Version)
	if slices.Compare(newest, ours) > 0 {
		newest = ours
	}
	if slices.Compare(newest, floor) < 0 {
		newest = floor
	}
	return fmt.Sprintf("%d.%d.%d", newest[0], newest[1], newest[2])
}

// parseVersion reads major.minor.patch and ignores a "-dev" or "+dev" tail.
func parseVersion(s string) ([]int, bool) {
	core, _, _ := strings.Cut(s, "-")
	core, _, _ = strings.Cut(core, "+")
	parts := strings.Split(core, ".")
	if len(parts) != 3 {
		return nil, false
	}
	version := make([]int, 3)
	for i, part := range parts {
		n, err := strconv.ParseUint(part, 10, 16)
		if err != nil {
			return nil, false
		}
		version[i] = int(n)
	}
	return version, true
}
