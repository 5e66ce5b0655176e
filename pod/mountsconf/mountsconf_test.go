package mountsconf

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// node is a directory in which tests put what a node has.
type node struct {
	*testing.T
	dir string
}

func newNode(t *testing.T) node {
	t.Parallel()
	return node{t, t.TempDir()}
}

func (n node) path(name string) string { return filepath.Join(n.dir, name) }

func (n node) must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// put makes a file with its directories.
func (n node) put(name, text string, mode fs.FileMode) {
	n.Helper()
	n.must(os.MkdirAll(filepath.Dir(n.path(name)), 0o755))
	n.must(os.WriteFile(n.path(name), []byte(text), 0o600))
	n.must(os.Chmod(n.path(name), mode))
}

// copy copies what a mounts.conf says, in which DIR is the node's directory.
func (n node) copy(conf, fips string) (mounts []*cri.Mount, problems []error) {
	n.Helper()
	n.put("mounts.conf", strings.ReplaceAll(conf, "DIR", n.dir), 0o644)
	set, problems := Read([]string{n.path("missing.conf"), n.path("mounts.conf"), n.path("later.conf")}, fips)
	n.must(os.MkdirAll(n.path("image"), 0o755))
	to := n.TempDir()
	mounts, skipped, err := set.Copy(to, n.path("image"), 1234, 5678)
	n.must(err)
	return mounts, append(problems, skipped...)
}

// files are all that a mount shows, by name, directories with a slash.
func (n node) files(m *cri.Mount) []string {
	n.Helper()
	var names []string
	n.must(filepath.WalkDir(m.HostPath, func(path string, d fs.DirEntry, err error) error {
		name := strings.TrimPrefix(path, m.HostPath)
		if d.IsDir() {
			name += "/"
		}
		names = append(names, name)
		return err
	}))
	return names
}

// A node's entitlements are copies: links are followed, modes stay, the owner is the
// container's root.
func TestCopies(t *testing.T) {
	n := newNode(t)
	n.put("pki/entitlement/1.pem", "key", 0o640)
	n.put("yum.repo", "repo", 0o604)
	n.must(os.MkdirAll(n.path("secrets"), 0o750))
	n.must(os.Symlink(n.path("pki/entitlement"), n.path("secrets/etc-pki-entitlement")))
	n.must(os.Symlink("../yum.repo", n.path("secrets/redhat.repo")))
	n.must(os.Symlink("/nowhere", n.path("secrets/rhsm")))
	n.must(os.Chmod(n.path("secrets"), 0o750))
	mounts, problems := n.copy("# comment\n\n  DIR/secrets:/run/secrets/\nDIR/missing:/missing\nDIR/yum.repo\n", "")
	if len(problems) > 0 || len(mounts) != 2 {
		t.Fatalf("mounts %v, problems %v", mounts, problems)
	}
	if mounts[0].ContainerPath != "/run/secrets" || mounts[1].ContainerPath != n.path("yum.repo") {
		t.Errorf("mounts %+v", mounts)
	}
	if got, want := n.files(mounts[0]), []string{"/", "/etc-pki-entitlement/", "/etc-pki-entitlement/1.pem", "/redhat.repo"}; !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	for path, mode := range map[string]fs.FileMode{"": 0o750 | fs.ModeDir, "/etc-pki-entitlement/1.pem": 0o640, "/redhat.repo": 0o604} {
		info, err := os.Lstat(mounts[0].HostPath + path)
		n.must(err)
		if st := info.Sys().(*syscall.Stat_t); info.Mode() != mode || st.Uid != 1234 || st.Gid != 5678 {
			t.Errorf("%s has mode %v and owner %d:%d", path, info.Mode(), st.Uid, st.Gid)
		}
	}
	text, err := os.ReadFile(mounts[0].HostPath + "/etc-pki-entitlement/1.pem")
	if err != nil || string(text) != "key" {
		t.Errorf("%q, %v", text, err)
	}
}

// Whoever can write to a place that is copied could have any file of the node copied.
func TestPlacesOfOthersAreSkipped(t *testing.T) {
	n := newNode(t)
	n.put("shadow", "secret", 0o600)
	n.put("theirs/own/file", "x", 0o644)
	n.must(os.Symlink(n.path("shadow"), n.path("theirs/own/link")))
	n.must(os.Chown(n.path("theirs/own"), 1000, 1000))
	n.must(os.MkdirAll(n.path("secrets/open"), 0o755))
	n.must(os.Chmod(n.path("secrets/open"), 0o777))
	n.put("secrets/writable", "x", 0o666)
	n.put("secrets/good", "x", 0o644)
	n.must(os.Symlink(n.path("shadow"), n.path("secrets/foreign-link")))
	n.must(os.Lchown(n.path("secrets/foreign-link"), 1000, 1000))
	n.must(os.Symlink("../theirs/own/link", n.path("secrets/through-theirs")))
	n.must(os.Symlink("../theirs/own", n.path("secrets/their-directory")))
	n.must(syscall.Mkfifo(n.path("secrets/fifo"), 0o600))
	n.must(os.Symlink("/dev/zero", n.path("secrets/zero")))
	n.must(os.Symlink("loop", n.path("secrets/loop")))
	mounts, problems := n.copy("DIR/secrets:/s\nDIR/theirs/own/file:/t\n", "")
	if len(mounts) != 1 || !slices.Equal(n.files(mounts[0]), []string{"/", "/good"}) {
		t.Errorf("mounts %v with %q", mounts, n.files(mounts[0]))
	}
	for _, name := range []string{"secrets/open", "secrets/writable", "secrets/foreign-link", "theirs/own", "secrets/fifo", "/dev/zero", "secrets/loop"} {
		if !slices.ContainsFunc(problems, func(err error) bool {
			return strings.Contains(err.Error(), name) && errors.Is(err, fault.Precondition)
		}) {
			t.Errorf("nothing is said of %s: %v", name, problems)
		}
	}
}

// Copies are bounded in size, number and depth, whatever links make of a directory.
func TestCopiesAreBounded(t *testing.T) {
	n := newNode(t)
	n.put("secrets/a", "x", 0o644)
	n.put("secrets/b-large", "", 0o644)
	n.must(os.Truncate(n.path("secrets/b-large"), maxBytes))
	n.put("secrets/c", "x", 0o644)
	n.must(os.Symlink(".", n.path("secrets/d-endless")))
	mounts, problems := n.copy("DIR/secrets:/s\n", "")
	got := n.files(mounts[0])
	if slices.Contains(got, "/b-large") || !slices.Contains(got, "/c") || len(got) > maxFiles || strings.Count(slices.MaxFunc(got, func(a, b string) int {
		return strings.Count(a, "/") - strings.Count(b, "/")
	}), "/") > maxDepth+2 {
		t.Errorf("%d files, among them %q", len(got), got[:4])
	}
	if len(problems) < 2 || !strings.Contains(problems[0].Error(), "more than 8388608 bytes") {
		t.Errorf("problems %v", problems)
	}
}

func TestNonsenseInMountsConf(t *testing.T) {
	n := newNode(t)
	n.put("good", "x", 0o644)
	for line, words := range map[string]string{
		"secrets:/run/secrets":        "not of the form",
		"DIR/good:run/secrets":        "not of the form",
		"DIR/good:/run/../etc":        "not of the form",
		"DIR/good:/":                  "not of the form",
		"DIR/good:/proc":              "nothing can be mounted at /proc",
		"DIR/good:/sys/fs":            "nothing can be mounted at /sys/fs",
		"DIR/good:/x\nDIR/secrets:/x": "/x is a destination twice",
		"DIR/good:/dev/shm/x":         "nothing can be mounted at /dev/shm/x",
	} {
		set, problems := func() (Set, []error) {
			n.put("mounts.conf", strings.ReplaceAll(line+"\nDIR/good:/fine\n", "DIR", n.dir), 0o644)
			return Read([]string{n.path("mounts.conf")}, "")
		}()
		if len(problems) != 1 || !strings.Contains(problems[0].Error(), words) || !strings.Contains(problems[0].Error(), "mounts.conf:") {
			t.Errorf("%q: %v", line, problems)
		}
		if set.Empty() {
			t.Errorf("%q: the line after it does not count", line)
		}
	}
	n.put("mounts.conf", n.path("good"), 0o666)
	if set, problems := Read([]string{n.path("mounts.conf")}, ""); !set.Empty() || len(problems) != 1 {
		t.Errorf("a file that all can write: %v, %v", set, problems)
	}
}

// A node in FIPS mode says so to containers, and gives them the policies of their image.
func TestFIPS(t *testing.T) {
	n := newNode(t)
	n.put("system-fips", "", 0o644)
	n.put("secrets/a", "x", 0o644)
	n.put("image/usr/share/crypto-policies/back-ends/FIPS/openssl.config", "strict", 0o644)
	for conf, want := range map[string][]string{"": {"/", "/system-fips"}, "DIR/secrets:/run/secrets": {"/", "/a", "/system-fips"}} {
		mounts, problems := n.copy(conf, n.path("system-fips"))
		if len(problems) > 0 || len(mounts) != 2 || mounts[0].ContainerPath != "/run/secrets" || !slices.Equal(n.files(mounts[0]), want) {
			t.Fatalf("%q: mounts %v, problems %v", conf, mounts, problems)
		}
		if mounts[1].ContainerPath != "/etc/crypto-policies/back-ends" || mounts[1].HostPath != n.path("image/usr/share/crypto-policies/back-ends/FIPS") {
			t.Errorf("%q: policies %+v", conf, mounts[1])
		}
	}
	// In a file there is no place for the mark, and that keeps no container from being made.
	if mounts, problems := n.copy("DIR/secrets/a:/run/secrets", n.path("system-fips")); len(mounts) != 1 || len(problems) != 1 {
		t.Errorf("mounts %v, problems %v", mounts, problems)
	}
	set, _ := Read(nil, n.path("system-fips"))
	if set.Empty() || !set.WithoutFIPS().Empty() {
		t.Error("a container cannot do without")
	}
	// A link of the image does not lead out of it.
	n.must(os.RemoveAll(n.path("image/usr/share/crypto-policies/back-ends/FIPS")))
	n.must(os.Symlink(n.path("secrets"), n.path("image/usr/share/crypto-policies/back-ends/FIPS")))
	if mounts, _ := n.copy("", n.path("system-fips")); len(mounts) != 1 {
		t.Errorf("mounts %v", mounts)
	}
}
