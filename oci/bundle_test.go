package oci

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// The process is found wherever it stands, and what follows is not even looked at.
func TestReadProcess(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(text string) {
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := &specs.Process{Args: []string{"a", `b"}`}, Env: []string{"A=" + strings.Repeat("x", 5000)}, Cwd: "/"}
	if err := writeSpec(dir, &specs.Spec{Version: "1.0", Process: want, Linux: &specs.Linux{}}); err != nil {
		t.Fatal(err)
	}
	if got, err := readProcess[specs.Process](dir); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("of a bundle as we write it: %v, %v", got, err)
	}
	for _, text := range []string{
		`{"process": {"terminal": true}, "linux": broken`,
		`{"linux": {"process": {"terminal": false}, "list": [1, {"process": 2}]}, "process": {"terminal": true}}`,
	} {
		write(text)
		if got, err := readProcess[struct{ Terminal bool }](dir); err != nil || !got.Terminal {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "{", `{}`, `{"linux": {"process": {}}}`, `{"linux": }`, `{"process": 3}`, `{"process": {"terminal"`, `[]`} {
		write(text)
		if got, err := readProcess[specs.Process](dir); err == nil || !strings.Contains(err.Error(), "config.json") {
			t.Errorf("%q: %v, %v", text, got, err)
		} else if text == "" && !errors.Is(err, io.EOF) {
			t.Errorf("of an empty file: %v", err)
		}
	}
	for what, make := range map[string]func(config string) error{
		"named pipe":     func(p string) error { return unix.Mkfifo(p, 0o600) },
		"link":           func(p string) error { return os.Symlink("/dev/zero", p) },
		"file of 10 TiB": func(p string) error { return errors.Join(os.WriteFile(p, nil, 0o600), os.Truncate(p, 10<<40)) },
	} {
		dir := t.TempDir()
		if err := make(filepath.Join(dir, "config.json")); err != nil {
			t.Fatal(err)
		}
		_, one := readProcess[specs.Process](dir)
		_, all := ReadSpec[specs.Spec](dir)
		if !errors.Is(one, fault.Invalid) || !errors.Is(all, fault.Invalid) {
			t.Errorf("of a %s: %v, and of all: %v", what, one, all)
		}
	}
	if _, err := readProcess[specs.Process](t.TempDir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a bundle: %v", err)
	}
}

// What is read of a bundle's process is what a reader of the whole bundle gets,
// however the document is written.
func FuzzReadProcess(f *testing.F) {
	for _, text := range []string{
		`{"process":{"args":["a","b\"}"],"cwd":"/","user":{"uid":7}},"linux":{}}`, `{"linux":{"process":{"cwd":"/x"}},"process":null}`,
		`{"process":{"terminal":1}}`, `{"process":{"cwd":"\ud800"}`, `[{"process":{}}]`, `{"process"`, "null", "",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600); err != nil {
			t.Fatal(err)
		}
		_, partErr := readProcess[specs.Process](dir)
		whole, err := ReadSpec[specs.Spec](dir)
		if err != nil || whole.Process == nil {
			return
		}
		if bytes.Count(text, []byte(`"process"`)) == 1 && partErr != nil {
			t.Errorf("%s: %v", text, partErr)
		}
		if err := writeSpec(dir, whole); err != nil {
			t.Fatal(err)
		}
		process, err := readProcess[specs.Process](dir)
		want, _ := json.Marshal(whole.Process)
		if got, _ := json.Marshal(process); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: process %s, want %s, %v", text, got, want, err)
		}
	})
}
