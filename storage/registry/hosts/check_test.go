package hosts

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCheckNamesEachFileThatPullsWouldFailAt(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"good.example":        "server = 'https://good.example'",
		"head.example_5000_":  "[host.'https://m'.header]\nAuthorization = 'Basic xyz'",
		"path.example":        "[host.'https://m/mirror']",
		"_default":            "server = ",
		"empty.example/notes": "",
	} {
		file := filepath.Join(dir, name, "hosts.toml")
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(filepath.Join(dir, "empty.example", "notes", "hosts.toml")); err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, err := range Check([]string{dir, filepath.Join(dir, "missing")}) {
		if strings.Contains(err.Error(), "xyz") {
			t.Errorf("a secret: %v", err)
		}
		file, _, _ := strings.Cut(strings.TrimPrefix(err.Error(), dir+"/"), ":")
		files = append(files, file)
	}
	if got := strings.Join(files, " "); got != "_default/hosts.toml _default/hosts.toml head.example_5000_/hosts.toml path.example/hosts.toml" {
		t.Errorf("wrong: %s", got)
	}
}
