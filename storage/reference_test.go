package storage

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
)

const someDigest = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

func TestParseReference(t *testing.T) {
	for ref, want := range map[string]string{
		"busybox":                             "busybox",
		"docker://busybox:1":                  "busybox:1",
		"docker:dind":                         "docker:dind", // an image of that name
		"oci:1":                               "oci:1",
		"quay.io/a/b@" + someDigest:           "quay.io/a/b@" + someDigest,
		"127.0.0.1:5000/a:tag@" + someDigest:  "127.0.0.1:5000/a:tag@" + someDigest,
		"docker.io/library/docker-archive:24": "docker.io/library/docker-archive:24",
	} {
		if got, err := parseReference(ref); err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", ref, got, err, want)
		}
	}
	for _, ref := range []string{
		"", " ", "UPPER", "a b", "a:", ":a", "a@", "@" + someDigest, "a@sha256:short", "a@md5:aaaa",
		"a@sha256:../../etc/passwd", "-a", "a/../b", "/a", "a\x00b", "a\nb", "ä",
		"docker-archive:/tmp/x.tar", "docker-archive:x", "oci-archive:x", "oci:/tmp/x", "dir:/etc",
		"containers-storage:busybox", "containers-storage:[overlay@/a+/b]busybox", "docker-daemon:busybox:latest",
		"https://quay.io/a", "docker://docker://a", "docker://", "file:///etc/passwd",
		strings.Repeat("a", 64), strings.Repeat("a/", 5000),
	} {
		if got, err := parseReference(ref); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %q, %v; want fault.Invalid", ref, got, err)
		}
	}
}

// registriesConf is a library context with one registries.conf.
func registriesConf(t testing.TB, content string) *types.SystemContext {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "registries.conf")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return &types.SystemContext{
		SystemRegistriesConfPath:    path,
		SystemRegistriesConfDirPath: path + ".d",
		UserShortNameAliasConfPath:  filepath.Join(dir, "aliases.conf"),
	}
}

func TestNames(t *testing.T) {
	const (
		none   = ``
		search = `unqualified-search-registries = ["one.example", "two.example:5000"]` + "\n"
		alias  = search + "[aliases]\n\"hello\" = \"quay.io/greetings/hi\"\n\"my/app\" = \"quay.io/mine/app\"\n"
	)
	for _, test := range []struct{ conf, name, want string }{
		{none, "busybox", "docker.io/library/busybox:latest"},
		{none, "busybox:1", "docker.io/library/busybox:1"},
		{none, "a/b", "docker.io/a/b:latest"},
		{none, "docker.io/busybox", "docker.io/library/busybox:latest"},
		{none, "index.docker.io/busybox", "docker.io/library/busybox:latest"},
		{none, "localhost/a", "localhost/a:latest"},
		{none, "host:5000/a", "host:5000/a:latest"},
		{none, "busybox@" + someDigest, "docker.io/library/busybox@" + someDigest},
		{none, "quay.io/a:1@" + someDigest, "quay.io/a@" + someDigest},
		{search, "busybox", "one.example/busybox:latest two.example:5000/busybox:latest"},
		{search, "a/b:1", "one.example/a/b:1 two.example:5000/a/b:1"},
		{search, "quay.io/a", "quay.io/a:latest"},
		{alias, "hello", "quay.io/greetings/hi:latest"},
		{alias, "hello:2", "quay.io/greetings/hi:2"},
		{alias, "hello@" + someDigest, "quay.io/greetings/hi@" + someDigest},
		{alias, "my/app:3", "quay.io/mine/app:3"},
		{alias, "my/hello", "one.example/my/hello:latest two.example:5000/my/hello:latest"},
	} {
		names, err := pullNames(registriesConf(t, test.conf), test.name)
		var got []string
		for _, name := range names {
			got = append(got, name.String())
		}
		if err != nil || strings.Join(got, " ") != test.want {
			t.Errorf("%q with %q: %q, %v; want %q", test.name, test.conf, got, err, test.want)
		}
	}
}

func TestAmbiguousShortNameIsRefusedWhenEnforced(t *testing.T) {
	sys := registriesConf(t, `unqualified-search-registries = ["one.example", "two.example"]
short-name-mode = "enforcing"`)
	if names, err := pullNames(sys, "busybox"); !errors.Is(err, fault.Invalid) {
		t.Errorf("%v, %v", names, err)
	}
	if names, err := localNames(sys, "busybox"); err != nil || len(names) != 3 {
		t.Errorf("what is here already may be asked for: %v, %v", names, err)
	}
}

func TestBrokenRegistriesConf(t *testing.T) {
	sys := registriesConf(t, `unqualified-search-registries = 3`)
	if _, err := pullNames(sys, "busybox"); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "registries.conf") {
		t.Errorf("%v", err)
	}
}

func TestFind(t *testing.T) {
	id := func(prefix string) string { return prefix + strings.Repeat("0", 64-len(prefix)) }
	images := []*Image{
		{ID: id("abc1"), RepoTags: []string{"docker.io/library/busybox:latest"}},
		{ID: id("abc2"), RepoTags: []string{"localhost/mine:latest", "quay.io/a/b:1"}, RepoDigests: []string{"quay.io/a/b@" + someDigest}},
		{ID: id("cafe"), RepoTags: []string{"docker.io/library/cafe1:latest"}},
		{ID: id("cafe1"), RepoTags: []string{"evil.example/x:latest"}},
	}
	slices.SortFunc(images, func(a, b *Image) int { return strings.Compare(a.ID, b.ID) })
	sys := registriesConf(t, "")
	names := func(name string) ([]reference.Named, error) { return localNames(sys, name) }
	for ref, want := range map[string]string{
		id("abc1"):                    id("abc1"),
		"sha256:" + id("abc1"):        id("abc1"),
		"busybox":                     id("abc1"),
		"docker://busybox":            id("abc1"),
		"busybox:latest":              id("abc1"),
		"docker.io/library/busybox":   id("abc1"),
		"mine":                        id("abc2"),
		"quay.io/a/b:1":               id("abc2"),
		"quay.io/a/b@" + someDigest:   id("abc2"),
		"quay.io/a/b:9@" + someDigest: id("abc2"), // the digest decides
		"cafe1":                       id("cafe"),
	} {
		if got, err := find(images, ref, names); err != nil || got.ID != want {
			t.Errorf("%q: %v, %v; want %s", ref, got, err, want)
		}
	}
	for ref, want := range map[string]error{
		"":                                 fault.Invalid,
		"abc":                              fault.NotFound,
		"abc1":                             fault.NotFound,
		id("abc1")[:63]:                    fault.NotFound,
		id("abc1") + "0":                   fault.NotFound,
		"sha256:abc1":                      fault.NotFound,
		"sha256:" + id("abc1")[:63]:        fault.NotFound,
		"sha256:" + id("abc1") + "0":       fault.NotFound,
		"sha256:sha256:" + id("abc1"):      fault.Invalid,
		"docker://" + id("abc1"):           fault.Invalid,
		"docker://sha256:" + id("abc1"):    fault.Invalid,
		id("abc3"):                         fault.NotFound,
		"sha256:" + id("abc3"):             fault.NotFound,
		"sha256:" + id("ABC1"):             fault.NotFound, // a tag
		id("ABC1"):                         fault.Invalid,
		"busybox:2":                        fault.NotFound,
		"busybox:abc1":                     fault.NotFound,
		"quay.io/a/c:1":                    fault.NotFound,
		"busybox@" + someDigest:            fault.NotFound,
		"busybox@sha256:abc1":              fault.Invalid,
		"quay.io/other/name@" + someDigest: fault.NotFound,
		"ABC1":                             fault.Invalid,
		"docker-archive:/x":                fault.Invalid,
	} {
		if got, err := find(images, ref, names); !errors.Is(err, want) {
			t.Errorf("%q: %v, %v; want %v", ref, got, err, want)
		}
	}

	// People may also type the beginning of an id.
	for ref, want := range map[string]string{
		"abc1": id("abc1"), id("abc2")[:63]: id("abc2"), id("abc2"): id("abc2"), "sha256:" + id("abc2"): id("abc2"), "mine": id("abc2"),
		"cafe1":  id("cafe"), // a name goes before somebody else's id
		"cafe10": id("cafe1"),
	} {
		if got, err := lookUp(images, ref, names); err != nil || got.ID != want {
			t.Errorf("%q: %v, %v; want %s", ref, got, err, want)
		}
	}
	for ref, want := range map[string]error{
		"abc": fault.Invalid, // two begin so
		"ab":  fault.NotFound, "fff": fault.NotFound, "ABC1": fault.Invalid, "abc1:latest": fault.NotFound,
		"sha256:abc1": fault.NotFound, "sha256:" + id("abc1")[:63]: fault.NotFound, id("abc1") + "0": fault.NotFound,
	} {
		if got, err := lookUp(images, ref, names); !errors.Is(err, want) {
			t.Errorf("people type %q: %v, %v; want %v", ref, got, err, want)
		}
	}
}

// ofKubelet is what a kubelet asks a runtime for where a pod's author writes image
// (applyDefaultImageTag in pkg/kubelet/images), empty for what it refuses.
func ofKubelet(image string) string {
	named, err := reference.ParseNormalizedNamed(image)
	if err != nil {
		return ""
	}
	if reference.IsNameOnly(named) {
		return image + ":latest"
	}
	return image
}

// No pod names an image of others by guessing digits: what a kubelet makes of the image in a
// pod's specification is a whole id, or a name.
func TestPodsDoNotNameImagesByTheBeginningOfAnID(t *testing.T) {
	id := strings.Repeat("5ec7e7a1", 8)
	images := []*Image{{ID: id, RepoTags: []string{"registry.example/tenant/private:1"}}}
	sys := registriesConf(t, `unqualified-search-registries = ["registry.example", "docker.io"]`)
	names := func(name string) ([]reference.Named, error) { return localNames(sys, name) }
	longer := id + "5ec7e7a1"
	for digits := 1; digits <= len(longer); digits++ {
		some := longer[:digits]
		for _, image := range []string{
			some, "sha256:" + some, strings.ToUpper(some), "sha256:" + strings.ToUpper(some), "SHA256:" + some, "sha256:sha256:" + some,
			"docker://" + some, "docker://sha256:" + some, some + ":latest", some + ":" + some, "@sha256:" + some, "private@sha256:" + some,
			"sha256@sha256:" + some, "library/" + some, "docker.io/library/sha256:" + some, "localhost/" + some,
			"containers-storage:" + some, "containers-storage:sha256:" + some, "sha512:" + some, " " + some, some + " ",
		} {
			whole := image == "sha256:"+id
			for _, sent := range []string{ofKubelet(image), image} { // image volumes and annotations are sent as they are
				got, err := find(images, sent, names)
				if found := err == nil; found != (whole || sent == id) {
					t.Errorf("%q, sent as %q: %v, %v", image, sent, got, err)
				}
			}
			if got, err := lookUp(images, ofKubelet(image), names); err == nil && !whole {
				t.Errorf("status of %q: %v", image, got)
			}
			if id, ok := wholeID(image); ok && len(id) != 64 {
				t.Errorf("%q is taken for an id", image)
			}
		}
	}
}

// What looks like a whole id never is a name, under which a registry could have other
// content.
func TestAnIDIsNotPulled(t *testing.T) {
	id := strings.Repeat("5ec7e7a1", 8)
	for _, ref := range []string{id, "sha256:" + id, "docker://sha256:" + id} {
		if _, err := parseReference(ref); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "image ID") {
			t.Errorf("%s: %v", ref, err)
		}
	}
}

// Whatever a reference looks like, it is refused as invalid or stands for full
// names that containers/image takes as they are.
func FuzzReference(f *testing.F) {
	for _, seed := range []string{
		"busybox", "a/b:1", "quay.io/a@" + someDigest, "docker://x", "FOO/bar", "a@b@c", "a:1:2", "localhost", "[::1]:5000/a", "a..b/c",
	} {
		f.Add(seed)
	}
	sys := registriesConf(f, `unqualified-search-registries = ["one.example"]`)
	f.Fuzz(func(t *testing.T, ref string) {
		name, err := parseReference(ref)
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Fatalf("%q: %v", ref, err)
			}
			return
		}
		names, err := localNames(sys, name)
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Fatalf("%q: %v", ref, err)
			}
			return
		}
		if len(names) == 0 {
			t.Fatalf("%q stands for nothing", ref)
		}
		for _, full := range names {
			if reference.IsNameOnly(full) {
				t.Errorf("%q: %s has neither tag nor digest", ref, full)
			}
			if _, err := reference.ParseNormalizedNamed(full.String()); err != nil {
				t.Errorf("%q: %s: %v", ref, full, err)
			}
		}
		if _, err := find(nil, ref, func(name string) ([]reference.Named, error) { return localNames(sys, name) }); err == nil {
			t.Errorf("%q found among no images", ref)
		}
	})
}
