package layout

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestWaitsAreInTheManual: whatever crius waits for has a name that crius status shows, and
// operators find all of these names in one table.
func TestWaitsAreInTheManual(t *testing.T) {
	t.Parallel()
	_, section, found := strings.Cut(read(t, "docs/operate.md"), "\n## What crius waits for\n")
	if !found {
		t.Fatal("docs/operate.md has no section about waits")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	var listed []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)`").FindAllStringSubmatch(section, -1) {
		listed = append(listed, row[1])
	}
	waits := map[string]bool{}
	fset := token.NewFileSet()
	sources(t, func(path, text string) {
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || below(path, "test") || below(path, "internal/trace") {
			return
		}
		file, err := parser.ParseFile(fset, path, text, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			for _, name := range waitNames(n) {
				waits[name] = true
				if !slices.Contains(listed, name) {
					t.Errorf("%s: the wait %q is not in the table of docs/operate.md", path, name)
				}
			}
			return true
		})
	})
	for _, name := range listed {
		if !waits[name] {
			t.Errorf("docs/operate.md lists %q, for which nothing waits", name)
		}
	}
}

// waitNames returns the names of waits that a node of the syntax gives: of trace.Waiting, and the
// constant part of what trace.For waits for.
func waitNames(n ast.Node) (names []string) {
	text := func(e ast.Expr) {
		if sum, ok := e.(*ast.BinaryExpr); ok {
			e = sum.X
		}
		if l, ok := e.(*ast.BasicLit); ok && l.Kind == token.STRING {
			name, _ := strconv.Unquote(l.Value)
			names = append(names, strings.TrimSpace(name))
		}
	}
	switch n := n.(type) {
	case *ast.CompositeLit:
		if !isTrace(n.Type, "Waiting") {
			return nil
		}
		for _, e := range n.Elts {
			if pair, ok := e.(*ast.KeyValueExpr); ok && pair.Key.(*ast.Ident).Name == "Name" {
				text(pair.Value)
			}
		}
	case *ast.CallExpr:
		if isTrace(n.Fun, "For") && len(n.Args) == 2 {
			text(n.Args[1])
		}
	}
	return names
}

func isTrace(e ast.Expr, name string) bool {
	s, ok := e.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	of, ok := s.X.(*ast.Ident)
	return ok && of.Name == "trace" && s.Sel.Name == name
}
