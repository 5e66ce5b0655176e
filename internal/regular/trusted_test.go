package regular

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

func TestTrustedFilesBelongToThisUserAlone(t *testing.T) {
	t.Parallel()
	for what, test := range map[string]struct {
		change        func(path string) error
		file, program bool
	}{
		"as it was":         {func(string) error { return nil }, true, true},
		"not executable":    {func(p string) error { return os.Chmod(p, 0o644) }, true, false},
		"link":              {func(p string) error { return errors.Join(os.Rename(p, p+"2"), os.Symlink(p+"2", p)) }, true, true},
		"of another user":   {func(p string) error { return os.Chown(p, 1001, 0) }, false, false},
		"writable by group": {func(p string) error { return os.Chmod(p, 0o775) }, false, false},
		"writable by all":   {func(p string) error { return os.Chmod(p, 0o757) }, false, false},
		"named pipe":        {func(p string) error { return errors.Join(os.Remove(p), unix.Mkfifo(p, 0o755)) }, false, false},
		"large":             {func(p string) error { return os.Truncate(p, limit+1) }, false, true},
		"directory":         {func(p string) error { return errors.Join(os.Remove(p), os.Mkdir(p, 0o755)) }, false, false},
	} {
		path := filepath.Join(t.TempDir(), "file")
		if err := errors.Join(os.WriteFile(path, []byte("text"), 0o755), test.change(path)); err != nil {
			t.Fatal(err)
		}
		text, err := ReadTrusted(path, limit)
		if test.file && (err != nil || string(text) != "text") || !test.file && !errors.Is(err, fault.Precondition) {
			t.Errorf("%s: %q, %v", what, text, err)
		}
		if err := Program(path); test.program && err != nil || !test.program && !errors.Is(err, fault.Precondition) {
			t.Errorf("%s as a program: %v", what, err)
		}
	}
	_, err := ReadTrusted("/nothing", limit)
	if program := Program("/nothing"); !errors.Is(err, fs.ErrNotExist) || !errors.Is(program, fs.ErrNotExist) {
		t.Errorf("absent: %v, %v", err, program)
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if names, err := Names(dir, 2); len(names) > 0 || err != nil {
		t.Errorf("empty: %q, %v", names, err)
	}
	for _, name := range []string{"a", "b"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	names, err := Names(dir, 2)
	if slices.Sort(names); err != nil || !slices.Equal(names, []string{"a", "b"}) {
		t.Errorf("%q, %v", names, err)
	}
	if names, err := Names(dir, 1); !errors.Is(err, fault.Precondition) {
		t.Errorf("more than the limit: %q, %v", names, err)
	}
	if names, err := Names(filepath.Join(dir, "a"), 1); !errors.Is(err, fault.Precondition) {
		t.Errorf("a file: %q, %v", names, err)
	}
	if _, err := Names("/nothing", 1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent: %v", err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if names, err := Names(dir, 2); !errors.Is(err, fault.Precondition) {
		t.Errorf("writable by all: %q, %v", names, err)
	}
}
