package config

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// files are names of files in texts that look like keys.
var files = []string{"storage.conf", "metrics.sock", "runtime.log", "runtime.json", "pod.json", "image.json", "network.json"}

// Options that messages name exist.
func TestMessagesNameOptionsThatExist(t *testing.T) {
	known := map[string]bool{}
	var tops []string
	for _, s := range Schema() {
		if top, _, _ := strings.Cut(s.Path, "."); top != "" && !known[top] {
			tops = append(tops, top)
			known[top] = true
		}
		known[s.Path] = true
		for _, k := range s.Keys {
			known[k.Path] = true
		}
	}
	for _, name := range files {
		known[name] = true
	}
	// These tables no longer exist, or never did: messages named options of images and of
	// the endpoint in them.
	tops = append(tops, "storage", "server", "handlers")
	key := regexp.MustCompile(`(?:^|[^\w./"\]-])((?:` + strings.Join(tops, "|") + `)\.[a-z_]+(?:\.(?:NAME|%s|%q)(?:\.[a-z_]+)?)?)`)
	section := regexp.MustCompile(`\[((?:` + strings.Join(tops, "|") + `)(?:\.[\w%]+)*)\]`)

	found := 0
	for _, text := range literals(t, "../../..") {
		var named []string
		for _, m := range key.FindAllStringSubmatch(text.text, -1) {
			named = append(named, m[1])
		}
		for _, m := range section.FindAllStringSubmatch(text.text, -1) {
			named = append(named, m[1])
		}
		for _, name := range named {
			found++
			name = strings.NewReplacer("%s", anyName, "%q", anyName).Replace(name)
			if name != "runtime.handlers" && !known[name] {
				t.Errorf("%s: no option is called %s: %q", text.where, name, text.text)
			}
		}
	}
	if found < 50 {
		t.Errorf("only %d options are named in messages: the test does not see them", found)
	}
}

type literal struct{ where, text string }

// literals returns the strings in the product's code that contain a blank, as messages do.
func literals(t *testing.T, root string) (all []literal) {
	t.Helper()
	for _, dir := range []string{"cmd", "conmon", "internal", "network", "nri", "oci", "pod", "server", "storage"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, entry fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if entry.IsDir() && entry.Name() == "testdata" {
				return fs.SkipDir
			}
			if entry.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
				return nil
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, path, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				lit, ok := n.(*ast.BasicLit)
				if !ok || lit.Kind != token.STRING {
					return true
				}
				if text, err := strconv.Unquote(lit.Value); err == nil && strings.Contains(text, " ") {
					all = append(all, literal{set.Position(lit.Pos()).String(), text})
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return all
}
