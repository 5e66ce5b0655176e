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
	"github.com/crius-run/crius/storage/registry"
)

const someDigest = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

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
	names := func(name string) ([]reference.Named, error) { return registry.LocalNames(sys, name) }
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

// ofKubelet returns the image for which a kubelet asks a runtime if a pod's author writes image
// (applyDefaultImageTag in pkg/kubelet/images), or "" if it refuses that.
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

// No pod can name an image of others by guessing digits: a kubelet turns the image in a pod's
// specification into a whole id or a name.
func TestPodsDoNotNameImagesByTheBeginningOfAnID(t *testing.T) {
	id := strings.Repeat("5ec7e7a1", 8)
	images := []*Image{{ID: id, RepoTags: []string{"registry.example/tenant/private:1"}}}
	sys := registriesConf(t, `unqualified-search-registries = ["registry.example", "docker.io"]`)
	names := func(name string) ([]reference.Named, error) { return registry.LocalNames(sys, name) }
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
			if id, ok := registry.WholeID(image); ok && len(id) != 64 {
				t.Errorf("%q is taken for an id", image)
			}
		}
	}
}

// Whatever a reference looks like, nothing is found among no images.
func FuzzFind(f *testing.F) {
	for _, seed := range []string{"busybox", "quay.io/a@" + someDigest, "sha256:" + strings.Repeat("5ec7e7a1", 8), "FOO/bar", "abc1"} {
		f.Add(seed)
	}
	sys := registriesConf(f, `unqualified-search-registries = ["one.example"]`)
	f.Fuzz(func(t *testing.T, ref string) {
		names := func(name string) ([]reference.Named, error) { return registry.LocalNames(sys, name) }
		for _, finds := range []func([]*Image, string, func(string) ([]reference.Named, error)) (*Image, error){find, lookUp} {
			if image, err := finds(nil, ref, names); err == nil || image != nil {
				t.Errorf("%q: %v, %v", ref, image, err)
			}
		}
	})
}
