package registry

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
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
		"my_user/my__app":                     "my_user/my__app",
		"Registry.EXAMPLE:5000/a__b/c_d:1":    "Registry.EXAMPLE:5000/a__b/c_d:1",
	} {
		if got, err := ParseReference(ref); err != nil || got != want {
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
		if got, err := ParseReference(ref); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %q, %v; want fault.Invalid", ref, got, err)
		}
	}
}

// No registry has an underscore in its name, and a name that begins with such a one is not taken for a path.
func TestRegistriesWithUnderscores_moby_34975_moby_26810(t *testing.T) {
	t.Parallel()
	for _, ref := range []string{"my_registry:5000/app:1", "my_registry.example/app", "a.my__registry.example/app@" + someDigest} {
		if got, err := ParseReference(ref); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "cannot have an underscore") {
			t.Errorf("%q: %q, %v", ref, got, err)
		}
	}
}

// A manifest is compared with digests of one kind alone.
func TestNamesWithOtherDigests_go_containerregistry_2427(t *testing.T) {
	t.Parallel()
	for _, d := range []digest.Digest{digest.SHA512.FromString("x"), digest.SHA384.FromString("x")} {
		if got, err := ParseReference("quay.io/a@" + d.String()); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "can only be by sha256, not by "+d.Algorithm().String()) {
			t.Errorf("%s: %q, %v", d, got, err)
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
		names, err := PullNames(registriesConf(t, test.conf), test.name)
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
	if names, err := PullNames(sys, "busybox"); !errors.Is(err, fault.Invalid) {
		t.Errorf("%v, %v", names, err)
	}
	if names, err := LocalNames(sys, "busybox"); err != nil || len(names) != 3 {
		t.Errorf("what is here already may be asked for: %v, %v", names, err)
	}
}

// The option counts, whatever the file says: CRI-O's default refuses what the file would allow.
func TestShortNameModeOfTheConfigurationCounts(t *testing.T) {
	for mode, refused := range map[string][2]bool{ModeOfFile: {true, false}, ModeEnforcing: {true, true}, ModeDisabled: {false, false}} {
		for i, file := range []string{"enforcing", "permissive"} {
			dir := t.TempDir()
			conf := filepath.Join(dir, "registries.conf")
			text := fmt.Sprintf("unqualified-search-registries = ['one.example', 'two.example']\nshort-name-mode = %q\n", file)
			if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			sys := Config{RegistriesConf: conf, RunRoot: dir, ShortNameMode: mode}.Context()
			if names, err := PullNames(sys, "busybox"); errors.Is(err, fault.Invalid) != refused[i] {
				t.Errorf("%s with %s in the file: %v, %v", mode, file, names, err)
			}
		}
	}
}

func TestBrokenRegistriesConf(t *testing.T) {
	sys := registriesConf(t, `unqualified-search-registries = 3`)
	if _, err := PullNames(sys, "busybox"); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "registries.conf") {
		t.Errorf("%v", err)
	}
}

// What looks like a whole id never is a name, under which a registry could have other
// content.
func TestAnIDIsNotPulled(t *testing.T) {
	id := strings.Repeat("5ec7e7a1", 8)
	for _, ref := range []string{id, "sha256:" + id, "docker://sha256:" + id} {
		if _, err := ParseReference(ref); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "image ID") {
			t.Errorf("%s: %v", ref, err)
		}
	}
}

// Whatever a reference looks like, it is refused as invalid or stands for full
// names that containers/image takes as they are.
func FuzzReference(f *testing.F) {
	for _, seed := range []string{
		"busybox", "a/b:1", "quay.io/a@" + someDigest, "docker://x", "FOO/bar", "a@b@c", "a:1:2", "localhost", "[::1]:5000/a", "a..b/c", "a_b.c/d",
	} {
		f.Add(seed)
	}
	sys := registriesConf(f, `unqualified-search-registries = ["one.example"]`)
	f.Fuzz(func(t *testing.T, ref string) {
		name, err := ParseReference(ref)
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Fatalf("%q: %v", ref, err)
			}
			return
		}
		names, err := LocalNames(sys, name)
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
			if reference.Domain(full) == "" {
				t.Errorf("%q: %s has no registry", ref, full)
			}
			if reference.IsNameOnly(full) {
				t.Errorf("%q: %s has neither tag nor digest", ref, full)
			}
			if _, err := reference.ParseNormalizedNamed(full.String()); err != nil {
				t.Errorf("%q: %s: %v", ref, full, err)
			}
		}
	})
}
