// Package layout enforces the rules of the source tree that no compiler knows:
// which package may import which, and what every file looks like. It has tests
// only.
package layout

import (
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// sources yields the path and content of every text file of the repository.
func sources(t *testing.T, visit func(path string, text string)) {
	t.Helper()
	seen := 0
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() {
			if slices.Contains([]string{".git", ".cache", "bin", "testdata"}, name) {
				return filepath.SkipDir
			}
			return nil
		}
		if !entry.Type().IsRegular() || slices.Contains([]string{"go.sum", "LICENSE"}, name) {
			return nil
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if !strings.Contains(string(data), "\x00") {
			seen++
			visit(strings.TrimPrefix(path, root+"/"), string(data))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 20 {
		t.Errorf("only %d files were seen", seen)
	}
}

func TestNothingIsLeftForLater(t *testing.T) {
	marks := []string{"TO" + "DO", "FIX" + "ME"}
	sources(t, func(path, text string) {
		for i, line := range strings.Split(text, "\n") {
			for _, mark := range marks {
				if strings.Contains(line, mark) {
					t.Errorf("%s:%d says %s: do it or open an issue", path, i+1, mark)
				}
			}
		}
	})
}

func TestGoFilesAreFormatted(t *testing.T) {
	sources(t, func(path, text string) {
		if filepath.Ext(path) != ".go" {
			return
		}
		formatted, err := format.Source([]byte(text))
		if err != nil {
			t.Errorf("%s: %v", path, err)
		} else if string(formatted) != text {
			t.Errorf("%s is not formatted: run gofmt -w %s", path, path)
		}
	})
}

// TestPackagesAreExplained requires one package comment in every package, which
// begins as godoc expects.
func TestPackagesAreExplained(t *testing.T) {
	docs := map[string][]string{} // by directory and package name
	sources(t, func(path, text string) {
		if filepath.Ext(path) != ".go" {
			return
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, text, parser.ParseComments|parser.PackageClauseOnly)
		if err != nil {
			t.Errorf("%v", err)
			return
		}
		if strings.HasSuffix(f.Name.Name, "_test") { // the external tests of a package
			return
		}
		key := filepath.Dir(path) + " " + f.Name.Name
		docs[key] = append(docs[key], begins(f)...)
	})
	for key, begin := range docs {
		dir, name, _ := strings.Cut(key, " ")
		want := []string{"Package " + name}
		if name == "main" {
			command := filepath.Base(dir)
			want = []string{"Command " + command, strings.ToUpper(command[:1]) + command[1:]}
		}
		if len(begin) != 1 || !slices.ContainsFunc(want, func(w string) bool { return strings.HasPrefix(begin[0]+" ", w+" ") }) {
			t.Errorf("package %s in %s: its comments begin with %q, want one that begins with %q", name, dir, begin, want)
		}
	}
}

// begins returns the first two words of the package comment, if there is one.
func begins(f *ast.File) []string {
	words := strings.Fields(f.Doc.Text())
	if len(words) < 2 {
		return nil
	}
	return []string{words[0] + " " + strings.TrimRight(words[1], ",.:;")}
}
