package layout

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// writers are the functions through which a fact comes to the disk, with the paths that may call
// them: each fact has one writer (docs/architecture.md). What containers/storage, CNI plugins and
// the kernel keep is confined by the rules of imports.
var writers = map[string][]string{
	"internal/record.At":           {"pod/records", "oci/tuning", "storage/durable"},
	"internal/record.Open":         {"pod/records", "oci/tuning", "storage/durable"},
	"pod/records.At":               {"pod"},
	"conmon.WriteExit":             {"pod"},
	"conmon/wire.WriteFile":        {"conmon"},
	"storage/artifact.Open":        {"storage"},
	"storage/quota.In":             {"storage"},
	"storage/registry/download.In": {"storage"},
}

func TestFactsHaveOneWriter(t *testing.T) {
	missing := maps.Clone(writers)
	delete(missing, "internal/record.Open") // for tests
	sources(t, func(file, text string) {
		if !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") || below(file, "test") {
			return
		}
		for _, called := range namesFrom(t, file, text) {
			owners, known := writers[called]
			if known && longest(path.Dir(file), owners) == "" {
				t.Errorf("%s uses %s, which only these may: %s", file, called, strings.Join(owners, ", "))
			}
			delete(missing, called)
		}
	})
	for called := range missing {
		t.Errorf("nothing uses %s: correct the table", called)
	}
}

// namesFrom returns the names of our packages that a file uses, as "path.Name".
func namesFrom(t *testing.T, file, text string) (names []string) {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, text, parser.SkipObjectResolution)
	if err != nil {
		t.Error(err)
		return nil
	}
	imports := map[string]string{}
	for _, spec := range f.Imports {
		imported, _ := strconv.Unquote(spec.Path.Value)
		ours, ok := strings.CutPrefix(imported, module)
		if !ok {
			continue
		}
		name := path.Base(ours)
		if spec.Name != nil {
			name = spec.Name.Name
		}
		imports[name] = ours
	}
	ast.Inspect(f, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if of, ok := sel.X.(*ast.Ident); ok && imports[of.Name] != "" {
				names = append(names, imports[of.Name]+"."+sel.Sel.Name)
			}
		}
		return true
	})
	slices.Sort(names)
	return slices.Compact(names)
}
