package layout

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	span     = regexp.MustCompile("`([^`\n]+)`")
	pathLike = regexp.MustCompile(`^([\w-]+)/[\w./-]*$`)
	testLike = regexp.MustCompile(`^(Test|Fuzz|Example|Benchmark)[A-Z_]\w*$`)
)

// TestHackingNamesWhatExists: every path and every test that docs/hacking.md names is there.
func TestHackingNamesWhatExists(t *testing.T) {
	var tests strings.Builder
	sources(t, func(path, text string) {
		if strings.HasSuffix(path, "_test.go") {
			tests.WriteString(text)
		}
	})
	paths, named := 0, 0
	for _, m := range span.FindAllStringSubmatch(read(t, "docs/hacking.md"), -1) {
		switch name := m[1]; {
		case testLike.MatchString(name):
			named++
			if !strings.Contains(tests.String(), "\nfunc "+name+"(") {
				t.Errorf("docs/hacking.md: there is no %s", name)
			}
		case pathLike.MatchString(name) && exists(pathLike.FindStringSubmatch(name)[1]): // else it is one of a node
			paths++
			if !exists(name) {
				t.Errorf("docs/hacking.md: there is no %s", name)
			}
		}
	}
	if paths < 30 || named < 10 {
		t.Errorf("only %d paths and %d tests seen", paths, named)
	}
}

// exists reports whether the repository has a path.
func exists(path string) bool {
	_, err := os.Stat(filepath.Join(root, path))
	return err == nil
}
