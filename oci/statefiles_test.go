package oci

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/conmon/shim"
)

// The name of a state file identifies its container: runc's are directories,
// runsc's are files.
func TestStateFiles(t *testing.T) {
	root := t.TempDir()
	one, two := strings.Repeat("1", 64), strings.Repeat("2", 64)
	for _, name := range []string{one + "/", two + "_sandbox:" + one + ".state", two + "_sandbox:" + one + ".lock", "runsc-" + one + ".sock", "k8s.io/" + two + "/", "stray.txt"} {
		path := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(path), 0o700)
		if err == nil && strings.HasSuffix(name, "/") {
			err = os.Mkdir(path, 0o700)
		} else if err == nil {
			err = os.WriteFile(path, nil, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	in := func(names ...string) []string {
		for i, name := range names {
			names[i] = filepath.Join(root, name)
		}
		return names
	}
	for name, c := range map[string]struct {
		runtime Runtime
		want    StateFiles
	}{
		"command line": {&cli{entry: &entry{handler: Handler{Root: root}}}, StateFiles{
			one: in(one, "runsc-"+one+".sock"), two: in(two+"_sandbox:"+one+".lock", two+"_sandbox:"+one+".state"),
			"k8s.io": in("k8s.io"), "stray.txt": in("stray.txt"),
		}},
		"shim": {&shimmed{entry: &entry{handler: Handler{Root: root}}}, StateFiles{two: in("k8s.io/" + two)}},
		"none": {&cli{entry: &entry{handler: Handler{Root: root + "/none"}}}, nil},
	} {
		got, err := c.runtime.StateFiles()
		if err != nil || !maps.EqualFunc(got, c.want, slices.Equal) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if _, err := (&cli{entry: &entry{handler: Handler{Root: filepath.Join(root, "stray.txt")}}}).StateFiles(); err == nil {
		t.Error("a file is taken for a root")
	}
}

// If the handler of a container is unknown all handlers are asked to delete it,
// and the first one finds that its shim is dead.
func TestStateFilesOfAnotherShim(t *testing.T) {
	dir, root := t.TempDir(), t.TempDir()
	book := filepath.Join(root, "k8s.io", "c1")
	if err := os.MkdirAll(book, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, shim.LogFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, r := range []*shimmed{{entry: &entry{handler: Handler{Path: "/none", Root: t.TempDir()}}}, {entry: &entry{handler: Handler{Path: "/none", Root: root}}}} {
		if err := r.Delete(t.Context(), Ref{ID: "c1", Dir: dir}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(book); err == nil {
		t.Error("the stateFiles of the second are left")
	}
}

// Whatever lies in a runtime's root, a container's own files are found by its
// id and those of other containers are not.
func FuzzSubject(f *testing.F) {
	own := strings.Repeat("1", 64)
	for _, name := range []string{own, "runsc-" + own + ".sock", own + "_sandbox:" + own + ".state", "runsc-", "_sandbox:", "runsc-.sock.sock", "\xff"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		id := subject(name)
		if !strings.Contains(name, id) || len(id) > len(name) {
			t.Errorf("%q is about %q", name, id)
		}
		if id == own && name != own && name != "runsc-"+own && name != runscSocket(own) && !strings.HasPrefix(name, own+"_sandbox:") {
			t.Errorf("%q is taken for a file of %s", name, own)
		}
		if subject(runscSocket(own)) != own || subject(own+"_sandbox:"+name) != own {
			t.Errorf("files of %s are not found beside %q", own, name)
		}
	})
}
