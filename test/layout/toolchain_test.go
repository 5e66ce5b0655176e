package layout

import (
	"regexp"
	"strings"
	"testing"
)

// TestGoVersionIsTheSameEverywhere compares the version of Go in go.mod with those that people
// and the linter read.
func TestGoVersionIsTheSameEverywhere(t *testing.T) {
	t.Parallel()
	version := func(file, pattern string) string {
		found := regexp.MustCompile(pattern).FindStringSubmatch(read(t, file))
		if found == nil {
			t.Fatalf("%s has nothing that matches %s", file, pattern)
		}
		return found[1]
	}
	language := version("go.mod", `(?m)^go (\d+\.\d+)\.\d+$`)
	toolchain := version("go.mod", `(?m)^toolchain go(\S+)$`)
	if !strings.HasPrefix(toolchain, language+".") {
		t.Errorf("go.mod wants Go %s and names the toolchain %s", language, toolchain)
	}
	// A linter that is built with an older Go refuses the repository.
	if got := version("test/tools/lint/go.mod", `(?m)^toolchain go(\S+)$`); got != toolchain {
		t.Errorf("test/tools/lint/go.mod names the toolchain %s, and go.mod %s", got, toolchain)
	}
	for file, pattern := range map[string]string{
		"test/tools/lint/go.mod": `(?m)^go (\d+\.\d+)\.\d+$`,
		"README.md":              `machine with Go (\d+\.\d+)`,
		"docs/hacking.md":        `written for Go (\d+\.\d+)`,
	} {
		if got := version(file, pattern); got != language {
			t.Errorf("%s says Go %s, and go.mod %s", file, got, language)
		}
	}
}
