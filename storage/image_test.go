package storage

import (
	"maps"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/test/kit/image"
)

// CVE-2024-40635, CVE-2026-46680: a user that overflows must not become
// another one, nor look as if it were proved not to be root.
func TestUser_CVE_2024_40635_CVE_2026_46680(t *testing.T) {
	for user, want := range map[string]int64{
		"": 0, ":": 0, ":5": 0, "0": 0, "0:0": 0, "1000": 1000, "1000:1000": 1000, "1000:wheel": 1000, "2147483647": 2147483647,
	} {
		uid, name := (&Image{Config: &imagespec.ImageConfig{User: user}}).User()
		if uid == nil || *uid != want || name != "" {
			t.Errorf("%q: %v, %q; want %d", user, uid, name, want)
		}
	}
	for user, want := range map[string]string{
		"www-data": "www-data", "www-data:www-data": "www-data",
		"2147483648": "2147483648", "4294967296": "4294967296", "-1": "-1", "+0": "+0", "0x0": "0x0", "00": "00", "01000": "01000",
		" 0": " 0", "0 ": "0 ", "1_0": "1_0", "٠": "٠", "0\n": "0\n",
		strings.Repeat("9", 70): strings.Repeat("9", 70),
	} {
		uid, name := (&Image{Config: &imagespec.ImageConfig{User: user}}).User()
		if uid != nil || name != want {
			t.Errorf("%q: %v, %q; want the name %q", user, uid, name, want)
		}
	}
}

func TestPinned(t *testing.T) {
	img := &Image{
		RepoTags:    []string{"registry.k8s.io/pause:3.9"},
		RepoDigests: []string{"registry.k8s.io/pause@" + someDigest},
	}
	for pattern, want := range map[string]bool{
		"registry.k8s.io/pause:3.9":           true,
		"registry.k8s.io/pause@" + someDigest: true,
		"registry.k8s.io/pause":               false,
		"registry.k8s.io/pause*":              true,
		"registry.k8s.io/*":                   true,
		"*pause*":                             true,
		"*:3.9":                               false, // neither prefix* nor *keyword*
		"pause*":                              false,
		"*":                                   true,
		"":                                    false,
		"*nginx*":                             false,
	} {
		if got := pinPatterns([]string{"other", pattern})(img); got != want {
			t.Errorf("%q: %t", pattern, got)
		}
	}
	if pinPatterns([]string{"*"})(&Image{}) {
		t.Error("an image without names is pinned")
	}
}

func TestRepoTagsAndDigests(t *testing.T) {
	const other = "sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
	for _, test := range []struct {
		what          string
		record        cstorage.Image
		tags, digests string
	}{
		{"one tag, manifest and index",
			cstorage.Image{Names: []string{"quay.io/a:1"}, Digests: []digest.Digest{someDigest, other}},
			"quay.io/a:1", "quay.io/a@" + someDigest + " quay.io/a@" + other},
		{"tags of two repositories",
			cstorage.Image{Names: []string{"quay.io/a:2", "quay.io/a:1", "docker.io/library/b:1"}, Digests: []digest.Digest{someDigest}},
			"docker.io/library/b:1 quay.io/a:1 quay.io/a:2", "docker.io/library/b@" + someDigest + " quay.io/a@" + someDigest},
		{"pulled by digest",
			cstorage.Image{Names: []string{"quay.io/a@" + someDigest}, Digests: []digest.Digest{someDigest}},
			"", "quay.io/a@" + someDigest},
		{"lost its name",
			cstorage.Image{NamesHistory: []string{"quay.io/a:2", "quay.io/a:1"}, Digests: []digest.Digest{someDigest}},
			"", "quay.io/a@" + someDigest},
		{"has a name, and had others",
			cstorage.Image{Names: []string{"quay.io/a:1"}, NamesHistory: []string{"quay.io/a:1", "quay.io/z:1"}, Digests: []digest.Digest{someDigest}},
			"quay.io/a:1", "quay.io/a@" + someDigest},
		{"names that are none",
			cstorage.Image{Names: []string{"short", "UPPER", "a\xff", "quay.io/a:1"}, Digests: []digest.Digest{"nonsense", someDigest}},
			"quay.io/a:1", "quay.io/a@" + someDigest},
		{"nothing", cstorage.Image{}, "", ""},
	} {
		if got := strings.Join(repoTags(&test.record), " "); got != test.tags {
			t.Errorf("%s: tags %q, want %q", test.what, got, test.tags)
		}
		if got := strings.Join(repoDigests(&test.record), " "); got != test.digests {
			t.Errorf("%s: digests %q, want %q", test.what, got, test.digests)
		}
	}
}

// Images and artifacts have the annotations of their manifests, even after a restart.
func TestAnnotationsOfImages(t *testing.T) {
	t.Parallel()
	want := map[string]string{"org.opencontainers.image.source": "https://example.com"}
	n := newNode(t)
	r := serve(t, "app", "1", build(t, image.Image{Annotations: want}))
	a := model(t, "annotated")
	ok(t, a.Change(func(m *imagespec.Manifest) error {
		m.Annotations = want
		return nil
	}))
	r.Push("model", "1", a)
	ids := []string{n.pull(r.Addr() + "/app:1").ID, n.pull(r.Addr() + "/model:1").ID}
	for range 2 {
		for _, id := range ids {
			if img, err := n.Image(testContext(t), id); err != nil || !maps.Equal(img.Annotations, want) {
				t.Errorf("%+v, %v", img, err)
			}
		}
		n.restart()
	}
}
