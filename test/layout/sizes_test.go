package layout

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The limits of the product's code, without tests, in lines. Other sizes have
// none: a reader judges whether a type or a package is too large, and a limit
// that is reached makes people shave what they should move.
const (
	maxFile     = 560
	maxFunction = 80
	unlimited   = math.MaxInt
)

// measured is one number with the name of its object.
type measured struct {
	name string
	size int
}

// sizes are the numbers of the product's code.
type sizes struct {
	packages, files, functions, parameters, methods []measured
	exported                                        []measured // methods of exported names
	disguised                                       []measured // functions that could be a type's methods

	interfaces   int
	undocumented []string // exported names without a doc comment
}

// TestSizes prints the numbers of the product's code (-v) and enforces the
// limits.
func TestSizes(t *testing.T) {
	all := measure(t)
	for _, kind := range []struct {
		name string
		of   []measured
		most int
	}{
		{"lines per package", all.packages, unlimited},
		{"lines per file", all.files, maxFile},
		{"lines per function", all.functions, maxFunction},
		{"parameters per function", all.parameters, unlimited},
		{"methods per type", all.methods, unlimited},
		{"exported methods per type", all.exported, unlimited},
		{"functions that take a type of their package first, per type", all.disguised, unlimited},
	} {
		slices.SortFunc(kind.of, func(a, b measured) int { return cmp.Or(cmp.Compare(b.size, a.size), cmp.Compare(a.name, b.name)) })
		at := func(percent int) int { return kind.of[(len(kind.of)-1)*(100-percent)/100].size }
		sum := 0
		for _, m := range kind.of {
			sum += m.size
		}
		t.Logf("%s: %d, sum %d, median %d, p99 %d; largest %v", kind.name, len(kind.of), sum, at(50), at(99), kind.of[:min(8, len(kind.of))])
		for _, m := range kind.of {
			if m.size > kind.most {
				t.Errorf("%s has %d %s, at most %d: split it", m.name, m.size, kind.name, kind.most)
			}
		}
	}
	t.Logf("%d interfaces", all.interfaces)
	for _, name := range all.undocumented {
		t.Errorf("%s is exported and has no doc comment", name)
	}
}

// measure reads the product's code.
func measure(t *testing.T) *sizes {
	all := &sizes{}
	lines, methods, exported, embeds := map[string]int{}, map[string]int{}, map[string]int{}, map[string][]string{}
	declared, disguised := map[string]bool{}, map[string]int{} // types; functions by the type that they take first
	sources(t, func(path, text string) {
		if filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") || below(path, "test") {
			return
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, path, text, parser.ParseComments)
		if err != nil {
			t.Error(err)
			return
		}
		pkg := filepath.Dir(path)
		lines[pkg] += strings.Count(text, "\n")
		all.files = append(all.files, measured{path, strings.Count(text, "\n")})
		for _, decl := range f.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				all.function(fset, pkg, d)
				of := pkg + "." + receiver(d)
				switch {
				case d.Recv == nil:
					disguised[pkg+"."+firstParameter(d)]++
				case d.Name.IsExported():
					exported[of]++
					fallthrough
				default:
					methods[of]++
				}
			case *ast.GenDecl:
				all.declaration(pkg, d, declared, embeds)
			}
		}
	})
	for pkg, n := range lines {
		all.packages = append(all.packages, measured{pkg, n})
	}
	for typ := range methods {
		all.methods = append(all.methods, measured{typ, promoted(typ, methods, embeds)})
		all.exported = append(all.exported, measured{typ, promoted(typ, exported, embeds)})
	}
	for typ, n := range disguised {
		if declared[typ] {
			all.disguised = append(all.disguised, measured{typ, n})
		}
	}
	return all
}

// promoted counts a type's methods including those of embedded types.
func promoted(typ string, methods map[string]int, embeds map[string][]string) int {
	n := methods[typ]
	for _, embedded := range embeds[typ] {
		n += promoted(embedded, methods, embeds)
	}
	return n
}

func (s *sizes) function(fset *token.FileSet, pkg string, d *ast.FuncDecl) {
	name := fmt.Sprintf("%s.%s", pkg, d.Name.Name)
	s.functions = append(s.functions, measured{name, fset.Position(d.End()).Line - fset.Position(d.Pos()).Line + 1})
	if d.Name.Name != "PutLayer" { // whose parameters are those of containers/storage
		s.parameters = append(s.parameters, measured{name, d.Type.Params.NumFields()})
	}
	of := receiver(d)
	plain := slices.Contains([]string{"Error", "Unwrap", "String"}, d.Name.Name) // self-explanatory
	if d.Name.IsExported() && !plain && d.Doc == nil && (of == "" || ast.IsExported(of)) {
		s.undocumented = append(s.undocumented, name)
	}
}

func (s *sizes) declaration(pkg string, d *ast.GenDecl, declared map[string]bool, embeds map[string][]string) {
	for _, spec := range d.Specs {
		typ, ok := spec.(*ast.TypeSpec)
		if !ok {
			continue
		}
		if typ.Name.IsExported() && typ.Doc == nil && d.Doc == nil {
			s.undocumented = append(s.undocumented, pkg+"."+typ.Name.Name)
		}
		declared[pkg+"."+typ.Name.Name] = true
		switch body := typ.Type.(type) {
		case *ast.InterfaceType:
			s.interfaces++
		case *ast.StructType:
			for _, field := range body.Fields.List {
				if name := typeName(field.Type); len(field.Names) == 0 && name != "" {
					embeds[pkg+"."+typ.Name.Name] = append(embeds[pkg+"."+typ.Name.Name], pkg+"."+name)
				}
			}
		}
	}
}

// receiver returns the name of a method's type, "" for a function.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	return typeName(d.Recv.List[0].Type)
}

// firstParameter is the name of the type of a function's first parameter after a context, "" if
// it has none or the type is of another package.
func firstParameter(d *ast.FuncDecl) string {
	for i, p := range d.Type.Params.List {
		sel, ok := p.Type.(*ast.SelectorExpr)
		if i > 0 || !ok || sel.Sel.Name != "Context" {
			return typeName(p.Type)
		}
	}
	return ""
}

// typeName returns the name of a type of the same package, "" for any other.
func typeName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return typeName(e.X)
	case *ast.IndexExpr:
		return typeName(e.X)
	case *ast.IndexListExpr:
		return typeName(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}
