package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// longest are the packages that take longest, the longest first: started first,
// they do not run alone in the end.
var longest = []string{
	"test/conformance", "test/integration", "test/runtimes", "storage", "conmon", "test/crash", "test/faults",
	"network", "server", "pod", "oci/spec", "internal/cgroup", "test/script",
}

// programs are the packages whose tests wait for other programs: the race
// detector would see nothing of these, or no more than in test/integration.
var programs = []string{"test/conformance", "test/runtimes", "test/crash", "test/script", "test/bench", "test/node", "test/cadvisor", "test/kubelet"}

const module = "github.com/crius-run/crius/"

// plan lists the packages with tests that the patterns name, in the order in
// which they start.
func (s *suite) plan(ctx context.Context) ([]string, error) {
	const format = `{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}`
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-tags", s.tags, "-f", format}, s.patterns...)...)
	cmd.Dir = s.dir
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	packages := strings.Fields(string(out))
	rank := func(p string) int {
		if i := slices.Index(longest, strings.TrimPrefix(p, module)); i >= 0 {
			return i
		}
		return len(longest)
	}
	slices.SortStableFunc(packages, func(a, b string) int { return cmp.Compare(rank(a), rank(b)) })
	return packages, nil
}

// raced reports whether a package runs with the race detector.
func (s *suite) raced(pkg string) bool {
	return s.race && !slices.Contains(programs, strings.TrimPrefix(pkg, module))
}
