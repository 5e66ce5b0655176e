package checkpoint

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(t, os.WriteFile(path, []byte(text), 0o644))
}

// entries returns the headers of an archive by name, and the contents of files.
func entries(t *testing.T, archive io.Reader) (map[string]*tar.Header, map[string]string) {
	t.Helper()
	headers, files := map[string]*tar.Header{}, map[string]string{}
	for in := tar.NewReader(archive); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return headers, files
		}
		must(t, err)
		headers[h.Name] = h
		text, err := io.ReadAll(in)
		must(t, err)
		files[h.Name] = string(text)
	}
}

// All that a container can make in its writable layer is in the archive, as are overlay's own signs of
// what it has removed, in their own list.
func TestDiff(t *testing.T) {
	t.Parallel()
	upper, outside := t.TempDir(), filepath.Join(t.TempDir(), "secret")
	put(t, outside, "secret")
	put(t, filepath.Join(upper, "a/file"), "text")
	must(t, os.Lchown(filepath.Join(upper, "a/file"), 1000, 1001))
	must(t, os.Chmod(filepath.Join(upper, "a/file"), 0o640|os.ModeSetuid))
	must(t, unix.Setxattr(filepath.Join(upper, "a/file"), "user.mine", []byte("yes"), 0))
	must(t, os.Link(filepath.Join(upper, "a/file"), filepath.Join(upper, "a/same")))
	must(t, os.Symlink(outside, filepath.Join(upper, "a/link")))
	must(t, unix.Mkfifo(filepath.Join(upper, "fifo"), 0o600))
	must(t, unix.Mknod(filepath.Join(upper, "gone"), unix.S_IFCHR, 0))
	must(t, unix.Mknod(filepath.Join(upper, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(t, os.Mkdir(filepath.Join(upper, "opaque"), 0o755))
	must(t, unix.Setxattr(filepath.Join(upper, "opaque"), "trusted.overlay.opaque", []byte("y"), 0))
	put(t, filepath.Join(upper, "proc/file"), "a file below a mount")
	put(t, filepath.Join(upper, "etc/hosts"), "")
	put(t, filepath.Join(upper, "etc/passwd"), "root")
	var out bytes.Buffer
	changes, err := Diff(t.Context(), upper, []string{"/proc", "/etc/hosts/", "/nowhere"}, &out)
	must(t, err)
	headers, files := entries(t, &out)
	for _, name := range []string{"./", "a/", "a/file", "a/same", "a/link", "fifo", "null", "opaque/", "etc/", "etc/passwd"} {
		if headers[name] == nil {
			t.Fatalf("%s is missing among %d entries", name, len(headers))
		}
	}
	if len(headers) != 10 {
		t.Errorf("%d entries, want 10", len(headers))
	}
	file := headers["a/file"]
	if file.Mode != 0o4640 || file.Uid != 1000 || file.Gid != 1001 || file.PAXRecords["SCHILY.xattr.user.mine"] != "yes" || files["a/file"] != "text" {
		t.Errorf("a/file is %+v", file)
	}
	if same := headers["a/same"]; same.Typeflag != tar.TypeLink || same.Linkname != "a/file" {
		t.Errorf("a/same is %+v", same)
	}
	if link := headers["a/link"]; link.Typeflag != tar.TypeSymlink || link.Linkname != outside || files["a/link"] != "" {
		t.Errorf("a/link is %+v", link)
	}
	if headers["fifo"].Typeflag != tar.TypeFifo || headers["null"].Typeflag != tar.TypeChar || headers["null"].Devminor != 3 {
		t.Errorf("fifo is %+v, null %+v", headers["fifo"], headers["null"])
	}
	if !slices.Equal(changes.Deleted, []string{"gone"}) || !slices.Equal(changes.Opaque, []string{"opaque"}) {
		t.Errorf("changes are %+v", changes)
	}
}

// part is one with an image.
func part(t *testing.T) Part {
	t.Helper()
	p := Part{filepath.Join(t.TempDir(), "part")}
	must(t, p.Make())
	put(t, filepath.Join(p.Images(), "inventory.img"), "image")
	must(t, p.PutConfig(Config{ID: "c1"}, map[string]string{"ociVersion": "1.0"}))
	return p
}

// A container can make files of any size that take no room: an archive has no place for their zeros.
// A copy ends with its context, also in the middle of a file.
func TestSparseFilesAreBounded(t *testing.T) {
	t.Parallel()
	upper := t.TempDir()
	put(t, filepath.Join(upper, "sparse"), "")
	must(t, os.Truncate(filepath.Join(upper, "sparse"), maxHoles+1<<20))
	if _, err := Diff(t.Context(), upper, nil, io.Discard); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), `"sparse"`) {
		t.Errorf("a sparse file: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	zeros, err := os.Open("/dev/zero")
	must(t, err)
	defer zeros.Close()
	if err := copyFile(ctx, writerFunc(func() { cancel() }), zeros, math.MaxInt64); !errors.Is(err, context.Canceled) {
		t.Errorf("a copy after the end of its context: %v", err)
	}
}

// writerFunc is called for each write.
type writerFunc func()

func (f writerFunc) Write(p []byte) (int, error) { f(); return len(p), nil }

// Two checkpoints of pods do not write into the same directory at once.
func TestClaim(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	open := func() *Target {
		target, err := OpenTarget(dir)
		must(t, err)
		return target
	}
	first, second := open(), open()
	defer second.Close()
	must(t, first.Claim())
	if err := second.Claim(); !errors.Is(err, fault.Unavailable) {
		t.Errorf("a second claim: %v", err)
	}
	first.Close()
	must(t, second.Claim())
}

// An archive has its name only when it is whole, replaces nothing, and follows no link.
func TestPutArchive(t *testing.T) {
	t.Parallel()
	dir, elsewhere := t.TempDir(), t.TempDir()
	target, err := OpenTarget(dir)
	must(t, err)
	defer target.Close()
	p := part(t)
	put(t, filepath.Join(dir, "file.tar"), "old")
	must(t, os.Symlink(filepath.Join(elsewhere, "new"), filepath.Join(dir, "link.tar")))
	for _, name := range []string{"file.tar", "link.tar"} {
		if err := target.PutArchive(t.Context(), p, ".tmp-"+name, name); !errors.Is(err, fault.Exists) {
			t.Errorf("%s: %v", name, err)
		}
		must(t, target.Remove(".tmp-"+name))
	}
	must(t, os.Symlink(filepath.Join(elsewhere, "new"), filepath.Join(dir, ".tmp")))
	if err := target.PutArchive(t.Context(), p, ".tmp", "new.tar"); err == nil {
		t.Error("the archive was written through a link")
	}
	must(t, target.Remove(".tmp"))
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := target.PutArchive(cancelled, p, ".tmp", "new.tar"); err == nil {
		t.Error("an archive was written without time")
	}
	must(t, target.Remove(".tmp", "never-made"))
	must(t, target.PutArchive(t.Context(), p, ".tmp", "new.tar"))
	found, err := os.ReadDir(dir)
	must(t, err)
	var names []string
	for _, e := range found {
		names = append(names, e.Name())
	}
	if !slices.Equal(names, []string{"file.tar", "link.tar", "new.tar"}) {
		t.Errorf("there is %q", names)
	}
	f, err := os.Open(filepath.Join(dir, "new.tar"))
	must(t, err)
	defer f.Close()
	info, err := f.Stat()
	must(t, err)
	headers, files := entries(t, f)
	if dir := headers["checkpoint/"]; dir == nil || dir.Mode != 0o700 { // which a user who unpacks it must be able to enter
		t.Errorf("the directory of images is %+v", dir)
	}
	if info.Mode() != 0o600 || files["checkpoint/inventory.img"] != "image" || !strings.Contains(files["config.dump"], `"id":"c1"`) {
		t.Errorf("mode %v, %v", info.Mode(), files)
	}
	if left, _ := os.ReadDir(elsewhere); len(left) > 0 {
		t.Errorf("%v was made elsewhere", left)
	}
}

// A directory that gets another name stays the target, and one that takes its name is not.
func TestTargetStays(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "out")
	must(t, os.Mkdir(dir, 0o700))
	target, err := OpenTarget(dir)
	must(t, err)
	defer target.Close()
	must(t, os.Rename(dir, dir+"-moved"))
	must(t, os.Mkdir(dir, 0o700))
	must(t, target.PutArchive(t.Context(), part(t), ".tmp", "a.tar"))
	must(t, target.PartIn("part").Make())
	key, err := NodeKey(t.TempDir())
	must(t, err)
	must(t, target.PutManifest(PodManifest{}, key, ".tmp"))
	for _, name := range []string{"a.tar", "part/checkpoint", Manifest} {
		if _, err := os.Stat(filepath.Join(dir+"-moved", name)); err != nil {
			t.Error(err)
		}
	}
	if empty, err := target.Empty(); empty || err != nil {
		t.Error("it counts as empty", err)
	}
	must(t, target.Remove("a.tar", "part", Manifest, Signature))
	if empty, err := target.Empty(); !empty || err != nil {
		t.Error("it is not empty", err)
	}
	for path, want := range map[string]error{dir + "/missing": fault.NotFound, "/dev/null": fault.Precondition} {
		if _, err := OpenTarget(path); !errors.Is(err, want) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// The signature covers all files, by a key that is made once and that only root can read.
func TestManifestIsSigned(t *testing.T) {
	t.Parallel()
	dir, keys := t.TempDir(), t.TempDir()
	put(t, filepath.Join(dir, "a/file"), "text")
	target, err := OpenTarget(dir)
	must(t, err)
	defer target.Close()
	files, err := target.Digests(t.Context())
	must(t, err)
	if len(files) != 1 || files[0].Path != "a/file" || files[0].Size != 4 || len(files[0].SHA256) != 64 {
		t.Errorf("the files are %v", files)
	}
	key, err := NodeKey(keys)
	must(t, err)
	if again, err := NodeKey(keys); err != nil || !again.Equal(key) {
		t.Errorf("another key was made: %v", err)
	}
	if info, err := os.Stat(filepath.Join(keys, "checkpoint.key")); err != nil || info.Mode() != 0o600 {
		t.Errorf("the key has the mode %v, %v", info, err)
	}
	must(t, target.PutManifest(PodManifest{Files: files}, key, ".tmp"))
	manifest, err := os.ReadFile(filepath.Join(dir, Manifest))
	must(t, err)
	encoded, err := os.ReadFile(filepath.Join(dir, Signature))
	must(t, err)
	signature, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(encoded)))
	must(t, err)
	public, _ := key.Public().(ed25519.PublicKey)
	if !ed25519.Verify(public, append([]byte("crius pod checkpoint\x00"), manifest...), signature) {
		t.Error("the signature does not fit the manifest")
	}
}

// checkpoint.pub belongs to the key, also after a crash between the two files and after the key was removed, and
// a key that others can read is not used.
func TestPublicKeyBelongsToTheKey(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	private, public := filepath.Join(dir, "checkpoint.key"), filepath.Join(dir, "checkpoint.pub")
	for what, change := range map[string]func() error{
		"first":   func() error { return nil },
		"crash":   func() error { return os.Remove(public) },
		"removed": func() error { return os.Remove(private) },
	} {
		if _, err := NodeKey(dir); err != nil {
			t.Fatal(err)
		}
		must(t, change())
		key, err := NodeKey(dir)
		must(t, err)
		text, err := os.ReadFile(public)
		must(t, err)
		block, _ := pem.Decode(text)
		shown, err := x509.ParsePKIXPublicKey(block.Bytes)
		must(t, err)
		if !key.Public().(ed25519.PublicKey).Equal(shown) {
			t.Errorf("%s: checkpoint.pub is that of another key", what)
		}
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 2 {
		t.Errorf("left: %v, %v", names, err)
	}
	must(t, os.Chmod(private, 0o640))
	if _, err := NodeKey(dir); !errors.Is(err, fault.Precondition) {
		t.Error(err)
	}
}
