package tools

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// What a script has made of Debian's packages is there for other clones while no archive can be reached, but not for
// another script, and not if something else is wrong.
func TestFromDebianIsKept(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	const online, offline, broken = "mkdir $1 && echo $2 >$1/program", "exit 75", "exit 1"
	// attempt builds in a clone of its own.
	attempt := func(script, does, says string) (string, error) {
		t.Helper()
		clone := t.TempDir()
		if err := os.WriteFile(filepath.Join(clone, "go.mod"), []byte("module github.com/crius-run/crius\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		t.Chdir(clone)
		path, err := fromDebian(t.Context(), "thing-1", []byte(script), func(_, dir string) *exec.Cmd {
			return exec.Command("sh", "-ec", does, "sh", filepath.Join(dir, "thing-1"), says)
		})
		if err != nil {
			return "", err
		}
		if want := filepath.Join(clone, ".cache", "bin", "thing-1"); path != want {
			t.Errorf("it is at %s, not %s", path, want)
		}
		text, err := os.ReadFile(filepath.Join(path, "program"))
		return string(text), err
	}
	for _, step := range []struct {
		script, does, says string
		want               string // empty: an error
	}{
		{"one", offline, "", ""},
		{"one", online, "first", "first\n"},
		{"one", offline, "", "first\n"},
		{"one", broken, "", ""},
		{"two", offline, "", ""},
		{"one", online, "second", "second\n"},
		{"one", offline, "", "second\n"},
		{"two", online, "third", "third\n"},
		{"two", offline, "", "third\n"},
		{"one", offline, "", ""}, // one copy is kept
	} {
		got, err := attempt(step.script, step.does, step.says)
		if got != step.want || (err != nil) != (step.want == "") || errors.Is(err, errUnreachable) != (err != nil && step.does == offline) {
			t.Errorf("%+v: %q, %v", step, got, err)
		}
	}
	if left, err := filepath.Glob(filepath.Join(os.Getenv("XDG_CACHE_HOME"), "crius-tests", "thing-1", "*")); err != nil || len(left) != 1 {
		t.Errorf("kept: %q, %v", left, err)
	}
}
