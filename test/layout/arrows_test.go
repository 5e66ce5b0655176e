package layout

import (
	"encoding/json"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// arrowPackages are the packages whose files TestFileArrows puts in order.
var arrowPackages = []string{"pod", "storage", "conmon/monitor", "cmd/crius"}

// arrows says which files use a name that another file declares, and how many names.
type arrows map[string]map[string]int

// TestFileArrows prints (-v) how many arrows between the files of a package run back up, in
// an order of the files that has few of them: a package that reads from the top down has none.
func TestFileArrows(t *testing.T) {
	if !testing.Verbose() { // nothing is checked, and types take time
		return
	}
	listed := listTypes(t, arrowPackages)
	for _, pkg := range arrowPackages {
		between := fileArrows(t, pkg, listed)
		order := between.order()
		total, up := 0, between.upward(order)
		for _, to := range between {
			total += len(to)
		}
		t.Logf("%s: %d files, %d arrows, %d of them up: %s", pkg, len(between), total, len(up), strings.Join(up, ", "))
		t.Logf("%s: from the top: %s", pkg, strings.Join(order, " "))
	}
}

// typed is a package with the file in which its types are, as go list -export has it.
type typed struct {
	ImportPath, Export string
	GoFiles            []string
}

// listTypes returns these packages and all that they import, by import path.
func listTypes(t *testing.T, packages []string) map[string]typed {
	t.Helper()
	args := []string{"list", "-deps", "-export", "-tags", tags, "-json=ImportPath,Export,GoFiles"}
	for _, pkg := range packages {
		args = append(args, "./"+pkg)
	}
	cmd := exec.Command("go", args...)
	cmd.Dir, cmd.Stderr = root, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	listed := map[string]typed{}
	for d := json.NewDecoder(strings.NewReader(string(out))); d.More(); {
		var p typed
		if err := d.Decode(&p); err != nil {
			t.Fatal(err)
		}
		listed[p.ImportPath] = p
	}
	return listed
}

// fileArrows reads the arrows between the files of a package, tests apart.
func fileArrows(t *testing.T, pkg string, listed map[string]typed) arrows {
	t.Helper()
	fset := token.NewFileSet()
	between, files := arrows{}, []*ast.File{}
	for _, name := range listed[module+pkg].GoFiles {
		f, err := parser.ParseFile(fset, filepath.Join(root, pkg, name), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
		between[name] = map[string]int{}
	}
	lookup := func(path string) (io.ReadCloser, error) { return os.Open(listed[path].Export) }
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	cfg := types.Config{Importer: importer.ForCompiler(fset, "gc", lookup)}
	checked, err := cfg.Check(module+pkg, fset, files, info)
	if err != nil {
		t.Fatal(err)
	}
	for ident, obj := range info.Uses {
		if obj.Pkg() != checked {
			continue
		}
		from, to := filepath.Base(fset.Position(ident.Pos()).Filename), filepath.Base(fset.Position(obj.Pos()).Filename)
		if from != to {
			between[from][to]++
		}
	}
	return between
}

// order puts the files in an order with few arrows up: first those that no other uses, last
// those that use no other, and in between, as long as there are circles, the file that uses
// most and is used least. Then each file moves to where it has the fewest arrows up, until
// none gains by it.
func (a arrows) order() []string {
	left := slices.Sorted(maps.Keys(a))
	degree := func(file string) (out, in int) {
		for _, other := range left {
			out += min(a[file][other], 1)
			in += min(a[other][file], 1)
		}
		return out, in
	}
	var first, last []string
	for len(left) > 0 {
		best, most, sink := 0, -len(a), -1
		for i, file := range left {
			out, in := degree(file)
			if in > 0 && out == 0 {
				sink = i
				break
			}
			if in == 0 {
				out = len(a)
			}
			if out-in > most {
				best, most = i, out-in
			}
		}
		if sink >= 0 {
			last = append([]string{left[sink]}, last...)
			left = slices.Delete(left, sink, sink+1)
			continue
		}
		first = append(first, left[best])
		left = slices.Delete(left, best, best+1)
	}
	order := append(first, last...)
	for moved := true; moved; {
		moved = false
		for _, file := range slices.Clone(order) {
			if next := a.settle(order, file); len(a.upward(next)) < len(a.upward(order)) {
				order, moved = next, true
			}
		}
	}
	return order
}

// settle returns the order with one file where it has the fewest arrows up.
func (a arrows) settle(order []string, file string) []string {
	rest := slices.DeleteFunc(slices.Clone(order), func(other string) bool { return other == file })
	up := 0 // with the file at the top
	for _, other := range rest {
		up += min(a[other][file], 1)
	}
	best, least := 0, up
	for i, other := range rest { // pass the other
		up += min(a[file][other], 1) - min(a[other][file], 1)
		if up < least {
			best, least = i+1, up
		}
	}
	return slices.Insert(rest, best, file)
}

// upward returns the arrows that run up in an order.
func (a arrows) upward(order []string) (up []string) {
	for i, to := range order {
		for _, from := range order[i+1:] {
			if a[from][to] > 0 {
				up = append(up, from+" -> "+to)
			}
		}
	}
	return up
}

func TestFileOrder(t *testing.T) {
	for _, c := range []struct {
		between arrows
		order   string
		up      int
	}{
		{arrows{"a": {}, "b": {}}, "a b", 0},
		{arrows{"c": {}, "a": {"b": 3}, "b": {"c": 1}}, "a b c", 0},
		{arrows{"c": {"a": 1}, "a": {}, "b": {"c": 1}}, "b c a", 0},
		{arrows{"a": {"b": 1, "c": 1}, "b": {"c": 9}, "c": {"a": 1}}, "a b c", 1},
		{arrows{"a": {"b": 1}, "b": {"a": 1}, "c": {"a": 1, "b": 1}}, "c a b", 1},
	} {
		order := c.between.order()
		if got := strings.Join(order, " "); got != c.order || len(c.between.upward(order)) != c.up {
			t.Errorf("%v: %s with %q up, want %s with %d", c.between, got, c.between.upward(order), c.order, c.up)
		}
	}
}
