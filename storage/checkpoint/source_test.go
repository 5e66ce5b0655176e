package checkpoint

import (
	"archive/tar"
	"bytes"
	"crypto/ed25519"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// signedPod is the directory of a checkpoint of one container, c, signed by a key in keys.
func signedPod(t *testing.T, keys string, change func(m *PodManifest)) (dir string) {
	t.Helper()
	dir = t.TempDir()
	put(t, filepath.Join(dir, "c/spec.dump"), `{"ociVersion":"1.0"}`)
	put(t, filepath.Join(dir, "c/checkpoint/pages-1.img"), "pages")
	put(t, filepath.Join(dir, Shm), "")
	target, err := OpenTarget(dir)
	must(t, err)
	defer target.Close()
	m := NewPodManifest(PodManifest{Handler: "runc", SharedMemory: Shm, Containers: []PodPart{{ID: "1", Name: "c", Directory: "c"}}})
	m.Files, err = target.Digests(t.Context())
	must(t, err)
	if change != nil {
		change(&m)
	}
	key, err := NodeKey(keys)
	must(t, err)
	must(t, target.PutManifest(m, key, ".tmp"))
	return dir
}

func trusted(t *testing.T, dir string, files ...string) []ed25519.PublicKey {
	t.Helper()
	keys, err := TrustedKeys(dir, files)
	must(t, err)
	return keys
}

// A signed checkpoint is read as it was signed for, and copied.
func TestSource(t *testing.T) {
	t.Parallel()
	keys, other := t.TempDir(), t.TempDir()
	dir := signedPod(t, keys, nil)
	_, err := NodeKey(other)
	must(t, err)
	for what, trust := range map[string][]ed25519.PublicKey{"no key": nil, "another node's": trusted(t, other)} {
		if _, err := OpenSource(dir, trust); !errors.Is(err, fault.Denied) {
			t.Errorf("%s: %v", what, err)
		}
	}
	s, err := OpenSource(dir, trusted(t, other, filepath.Join(keys, PublicFile)))
	must(t, err)
	defer s.Close()
	part, ok := s.Part("c")
	if _, more := s.Part("d"); !ok || more || s.Manifest.Handler != "runc" || s.Size() != 25 {
		t.Errorf("the manifest is %+v", s.Manifest)
	}
	to := filepath.Join(t.TempDir(), "copy")
	p, err := s.Fetch(t.Context(), part, to)
	must(t, err)
	if spec, err := p.Spec(); err != nil || string(spec) != `{"ociVersion":"1.0"}` {
		t.Errorf("the spec is %q, %v", spec, err)
	}
	if pages, err := os.ReadFile(filepath.Join(p.Images(), "pages-1.img")); err != nil || string(pages) != "pages" {
		t.Errorf("the pages are %q, %v", pages, err)
	}
	// What changes between the look and the use is noticed.
	put(t, filepath.Join(dir, "c/checkpoint/pages-1.img"), "PAGES")
	if _, err := s.Fetch(t.Context(), part, to+"2"); !errors.Is(err, fault.Denied) {
		t.Errorf("a changed file: %v", err)
	}
	must(t, os.Remove(filepath.Join(dir, "c/checkpoint/pages-1.img")))
	must(t, unix.Mkfifo(filepath.Join(dir, "c/checkpoint/pages-1.img"), 0o600))
	if _, err := s.Fetch(t.Context(), part, to+"4"); !errors.Is(err, fault.Invalid) {
		t.Errorf("a pipe in the place of a file: %v", err)
	}
	must(t, os.RemoveAll(filepath.Join(dir, "c/checkpoint")))
	must(t, os.Symlink("/etc", filepath.Join(dir, "c/checkpoint")))
	if _, err := s.Fetch(t.Context(), part, to+"3"); !errors.Is(err, fault.Invalid) {
		t.Errorf("a link in the place of a directory: %v", err)
	}
}

// No manifest, even a signed one, leads out of its directory or has anything twice.
func TestHostileManifests(t *testing.T) {
	t.Parallel()
	keys := t.TempDir()
	file := func(path string) func(m *PodManifest) {
		return func(m *PodManifest) { m.Files = append(m.Files, File{Path: path}) }
	}
	for name, c := range map[string]struct {
		want   error
		change func(m *PodManifest)
	}{
		"version":             {fault.Precondition, func(m *PodManifest) { m.Version = 1 }},
		"architecture":        {fault.Precondition, func(m *PodManifest) { m.Architecture = runtime.GOARCH + "x" }},
		"path out":            {fault.Invalid, file("../x")},
		"absolute path":       {fault.Invalid, file("/etc/passwd")},
		"path with a detour":  {fault.Invalid, file("c/../c/x")},
		"deep path":           {fault.Invalid, file("c/checkpoint/a/b")},
		"manifest as a file":  {fault.Invalid, file(Manifest)},
		"signature as a file": {fault.Invalid, file(Signature)},
		"file of nobody":      {fault.Invalid, file("d/x")},
		"missing file":        {fault.Invalid, file("c/x")},
		"file twice":          {fault.Invalid, file("c/spec.dump")},
		"file left out":       {fault.Invalid, func(m *PodManifest) { m.Files = m.Files[1:] }},
		"negative size":       {fault.Invalid, func(m *PodManifest) { m.Files[0].Size = -1 }},
		"endless sizes":       {fault.Invalid, func(m *PodManifest) { m.Files[0].Size, m.Files[1].Size = 1<<63-1, 1 }},
		"no container":        {fault.Invalid, func(m *PodManifest) { m.Containers = nil }},
		"container twice":     {fault.Invalid, func(m *PodManifest) { m.Containers = append(m.Containers, PodPart{Name: "c", Directory: "d"}) }},
		"directory twice":     {fault.Invalid, func(m *PodManifest) { m.Containers = append(m.Containers, PodPart{Name: "d", Directory: "c"}) }},
		"directory out":       {fault.Invalid, func(m *PodManifest) { m.Containers[0].Directory = ".." }},
		"directory itself":    {fault.Invalid, func(m *PodManifest) { m.Containers[0].Directory = "." }},
		"directory in one":    {fault.Invalid, func(m *PodManifest) { m.Containers[0].Directory = "c/checkpoint" }},
		"no directory":        {fault.Invalid, func(m *PodManifest) { m.Containers[0].Directory = "" }},
		"no name":             {fault.Invalid, func(m *PodManifest) { m.Containers[0].Name = "" }},
		"directory as a file": {fault.Invalid, file("c")},
		"path with an end":    {fault.Invalid, file("c/spec.dump/")},
		"requests":            {fault.Invalid, func(m *PodManifest) { m.Request = "c/spec.dump" }},
		"shared memory":       {fault.Invalid, func(m *PodManifest) { m.SharedMemory = "../x" }},
		"many files":          {fault.Invalid, func(m *PodManifest) { m.Files = make([]File, maxFiles+1) }},
	} {
		_, err := OpenSource(signedPod(t, keys, c.change), trusted(t, keys))
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// A server that writes a checkpoint finds out by Check whether it can be read.
func TestCheckManifest(t *testing.T) {
	t.Parallel()
	m := NewPodManifest(PodManifest{Containers: []PodPart{{ID: "c1", Name: "main", Directory: "c1"}}})
	for i := range maxFiles {
		m.Files = append(m.Files, File{Path: fmt.Sprintf("c1/checkpoint/core-%d.img", i)})
	}
	must(t, m.Check())
	m.Files = append(m.Files, File{Path: "c1/spec.dump"})
	if err := m.Check(); err == nil || !strings.Contains(err.Error(), "more than 16384 files") {
		t.Errorf("a checkpoint of too many files: %v", err)
	}
}

// What is in a directory beside the files of its manifest is refused, however much there is, and where it leads.
func TestStrangersInDirectory(t *testing.T) {
	t.Parallel()
	keys := t.TempDir()
	for name, c := range map[string]struct {
		want  string
		plant func(dir string) error
	}{
		"file":                {`"x" is no file`, func(dir string) error { return os.WriteFile(filepath.Join(dir, "x"), nil, 0o600) }},
		"file of a container": {`"c/checkpoint/x" is no file`, func(dir string) error { return os.WriteFile(filepath.Join(dir, "c/checkpoint/x"), nil, 0o600) }},
		"directory":           {`"x" is no file`, func(dir string) error { return os.MkdirAll(filepath.Join(dir, "x/y/z"), 0o700) }},
		"directory of a file": {`"c/spec.dump" is no file`, func(dir string) error {
			return errors.Join(os.Remove(filepath.Join(dir, "c/spec.dump")), os.Mkdir(filepath.Join(dir, "c/spec.dump"), 0o700))
		}},
		"link": {`"x" is no file`, func(dir string) error { return os.Symlink("/etc/passwd", filepath.Join(dir, "x")) }},
		"link for a file": {`"c/spec.dump" is no file`, func(dir string) error {
			return errors.Join(os.Remove(filepath.Join(dir, "c/spec.dump")), os.Symlink("/etc/passwd", filepath.Join(dir, "c/spec.dump")))
		}},
		"link for a directory": {`"c" is no file`, func(dir string) error {
			return errors.Join(os.Rename(filepath.Join(dir, "c"), filepath.Join(keys, "c")), os.Symlink(filepath.Join(keys, "c"), filepath.Join(dir, "c")))
		}},
		"pipe for a file": {`"c/spec.dump" is no file`, func(dir string) error {
			return errors.Join(os.Remove(filepath.Join(dir, "c/spec.dump")), unix.Mkfifo(filepath.Join(dir, "c/spec.dump"), 0o600))
		}},
		"link for the manifest": {"not a regular file of the directory", func(dir string) error {
			return errors.Join(os.Rename(filepath.Join(dir, Manifest), filepath.Join(keys, Manifest)), os.Symlink(filepath.Join(keys, Manifest), filepath.Join(dir, Manifest)))
		}},
	} {
		dir := signedPod(t, keys, nil)
		must(t, c.plant(dir))
		if _, err := OpenSource(dir, trusted(t, keys)); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", name, err, c.want)
		}
	}
}

// Keys that cannot be used are named, and not left out.
func TestTrustedKeys(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if keys := trusted(t, dir); len(keys) != 0 {
		t.Errorf("a node that has signed nothing trusts %d keys", len(keys))
	}
	_, err := NodeKey(dir)
	must(t, err)
	if keys := trusted(t, dir, filepath.Join(dir, PublicFile)); len(keys) != 2 {
		t.Errorf("there are %d keys", len(keys))
	}
	for name, text := range map[string]string{
		"empty": "", "text": "key", "private": read(t, filepath.Join(dir, KeyFile)),
		"other": string(pem.EncodeToMemory(&pem.Block{Type: pemPublic, Bytes: []byte("x")})),
	} {
		put(t, filepath.Join(dir, name), text)
		if _, err := TrustedKeys(dir, []string{filepath.Join(dir, name)}); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "restore_keys") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := TrustedKeys(dir, []string{filepath.Join(dir, "missing")}); !errors.Is(err, fault.Precondition) {
		t.Errorf("a missing file: %v", err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	must(t, err)
	return string(text)
}

// Apply makes what Diff has found, with owners, modes, attributes, links and times.
func TestApplyAfterDiff(t *testing.T) {
	t.Parallel()
	upper, root := t.TempDir(), t.TempDir()
	put(t, filepath.Join(upper, "a/file"), "text")
	must(t, os.Lchown(filepath.Join(upper, "a/file"), 1000, 1001))
	must(t, os.Chmod(filepath.Join(upper, "a/file"), 0o640|os.ModeSetuid))
	must(t, unix.Setxattr(filepath.Join(upper, "a/file"), "user.mine", []byte("yes"), 0))
	must(t, os.Link(filepath.Join(upper, "a/file"), filepath.Join(upper, "a/same")))
	must(t, os.Symlink("/etc/passwd", filepath.Join(upper, "a/link")))
	must(t, unix.Mkfifo(filepath.Join(upper, "fifo"), 0o600))
	must(t, unix.Mknod(filepath.Join(upper, "gone"), unix.S_IFCHR, 0))
	put(t, filepath.Join(upper, "opaque/new"), "")
	must(t, unix.Setxattr(filepath.Join(upper, "opaque"), "trusted.overlay.opaque", []byte("y"), 0))
	var archive bytes.Buffer
	changes, err := Diff(t.Context(), upper, nil, &archive)
	must(t, err)
	put(t, filepath.Join(root, "a/file"), "of the image")
	put(t, filepath.Join(root, "gone/below"), "")
	put(t, filepath.Join(root, "opaque/old"), "")
	put(t, filepath.Join(root, "fifo"), "")
	must(t, Apply(t.Context(), &archive, changes, root))
	var found []string
	must(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		name, _ := filepath.Rel(root, path)
		found = append(found, name)
		return err
	}))
	if want := []string{".", "a", "a/file", "a/link", "a/same", "fifo", "opaque", "opaque/new"}; !slices.Equal(found, want) {
		t.Errorf("there is %q", found)
	}
	var was, is, same unix.Stat_t
	must(t, unix.Stat(filepath.Join(upper, "a/file"), &was))
	must(t, unix.Stat(filepath.Join(root, "a/file"), &is))
	must(t, unix.Stat(filepath.Join(root, "a/same"), &same))
	value := make([]byte, 8)
	n, err := unix.Getxattr(filepath.Join(root, "a/file"), "user.mine", value)
	must(t, err)
	if is.Uid != 1000 || is.Gid != 1001 || is.Mode != was.Mode || is.Mtim != was.Mtim || is.Ino != same.Ino || string(value[:n]) != "yes" || read(t, filepath.Join(root, "a/file")) != "text" {
		t.Errorf("a/file is %+v", is)
	}
}

// Whatever an archive says, nothing outside of the directory is made, changed or removed.
func TestApplyStaysInside(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		headers []tar.Header
		changes Changes
	}{
		"path out":                {headers: []tar.Header{{Name: "../evil", Typeflag: tar.TypeReg}}},
		"absolute path":           {headers: []tar.Header{{Name: "/evil", Typeflag: tar.TypeReg}}},
		"detour":                  {headers: []tar.Header{{Name: "a/../../evil", Typeflag: tar.TypeReg}}},
		"through a link":          {headers: []tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "OUT"}, {Name: "l/evil", Typeflag: tar.TypeReg}}},
		"directory behind a link": {headers: []tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "OUT"}, {Name: "l/evil/", Typeflag: tar.TypeDir}}},
		"hard link to a file":     {headers: []tar.Header{{Name: "evil", Typeflag: tar.TypeLink, Linkname: "OUT/victim"}}},
		"hard link behind a link": {headers: []tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "OUT"}, {Name: "evil", Typeflag: tar.TypeLink, Linkname: "l/victim"}}},
		"device":                  {headers: []tar.Header{{Name: "evil", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 1}}},
		"block device":            {headers: []tar.Header{{Name: "evil", Typeflag: tar.TypeBlock, Devmajor: 8}}},
		"owner":                   {headers: []tar.Header{{Name: "evil", Typeflag: tar.TypeReg, Uid: -1}}},
		"deletion by an entry":    {headers: []tar.Header{{Name: "out/victim", Typeflag: tar.TypeChar}}},
		"deletion out":            {changes: Changes{Deleted: []string{"../victim"}}},
		"deletion of all":         {changes: Changes{Deleted: []string{"."}}},
		"deletion behind a link":  {changes: Changes{Deleted: []string{"out/victim"}}},
		"opaque behind a link":    {changes: Changes{Opaque: []string{"out/victim"}}},
	} {
		out, root := t.TempDir(), t.TempDir()
		put(t, filepath.Join(out, "victim"), "victim")
		must(t, os.Symlink(out, filepath.Join(root, "out")))
		var archive bytes.Buffer
		to := tar.NewWriter(&archive)
		for _, h := range c.headers {
			h.Linkname = strings.ReplaceAll(h.Linkname, "OUT", out)
			if h.Uid < 0 {
				h.Uid, h.PAXRecords = 0, map[string]string{"uid": "-1"}
			}
			if err := to.WriteHeader(&h); err != nil && h.PAXRecords == nil {
				t.Fatal(err)
			}
		}
		_ = to.Close()
		if err := Apply(t.Context(), &archive, c.changes, root); err == nil && name != "owner" {
			t.Errorf("%s: no error", name)
		}
		if left, err := os.ReadDir(out); err != nil || len(left) != 1 || read(t, filepath.Join(out, "victim")) != "victim" {
			t.Errorf("%s: outside is %v, %v", name, left, err)
		}
		if _, err := os.Lstat(filepath.Join(filepath.Dir(root), "evil")); err == nil {
			t.Errorf("%s: it is beside the directory", name)
		}
	}
}
