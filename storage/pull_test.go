package storage

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/registry/hosts"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// The library forks a copy of the process to find out whether it could shift ids,
// and notes the answer: a copy that outlives a killed server keeps its locks.
func TestLibraryIsNotToShiftIDs(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.pull(serve(t, "app", "1", noise(t, 1<<10)).Addr() + "/app:1")
	noted, err := filepath.Glob(filepath.Join(n.cfg.RunRoot, "*", "*-*"))
	if err != nil || slices.ContainsFunc(noted, func(f string) bool { return strings.Contains(f, "idmapped") }) {
		t.Errorf("the library has noted %q, %v", noted, err)
	}
}

func TestPullListRemove(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "hello\n")
	r := serve(t, "library/hello", "1", a)
	name := r.Addr() + "/library/hello"
	img := n.pull("docker://" + name + ":1")
	if img.ID != a.ID() || !slices.Equal(img.RepoTags, []string{name + ":1"}) ||
		!slices.Equal(img.RepoDigests, []string{name + "@" + a.Digest().String()}) {
		t.Errorf("pulled %+v", img)
	}
	if img.Size < 2*512 || img.Config.Cmd[0] != "/bin/true" {
		t.Errorf("pulled %+v", img)
	}
	if uid, _ := img.User(); uid == nil || *uid != 1000 {
		t.Errorf("user %v", uid)
	}
	for _, ref := range []string{img.ID, "sha256:" + img.ID, name + ":1", name + "@" + a.Digest().String()} {
		if got, err := n.Image(testContext(t), ref); err != nil || got != img {
			t.Errorf("%s: %v, %v", ref, got, err)
		}
	}
	for _, ref := range []string{img.ID[:8], "sha256:" + img.ID[:8], "sha256:" + img.ID[:63]} {
		if got, err := n.Image(testContext(t), ref); !errors.Is(err, fault.NotFound) {
			t.Errorf("%s: %v, %v", ref, got, err)
		}
	}
	if got, err := n.LookUp(testContext(t), img.ID[:8]); err != nil || got != img {
		t.Errorf("looked up: %v, %v", got, err)
	}
	n.remove("sha256:" + img.ID[:8]) // is no image
	n.restart()
	if images := n.list(); len(images) != 1 || images[0].ID != img.ID || !slices.Equal(images[0].RepoTags, img.RepoTags) || images[0].Size != img.Size {
		t.Errorf("after a restart: %+v", images)
	}
	n.remove(name + ":1")
	n.remove(name + ":1") // it is gone, which is fine
	if _, err := n.Image(testContext(t), img.ID); !errors.Is(err, fault.NotFound) {
		t.Errorf("after the removal: %v", err)
	}
	n.empty()
}

// One and the same id in PullImage, ListImages and ImageStatus, whatever the
// format (the consistency rule of kubelet 1.36).
func TestImageIDInEveryFormat(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := registrytest.Start(t)
	config := imagespec.ImageConfig{User: "0"}
	content := func(text string) []image.Layer { return []image.Layer{layer(t, image.Text("file", text))} }
	oci := build(t, image.Image{Config: config, Layers: content("oci")})
	docker := build(t, image.Image{Config: config, Layers: content("docker"), Docker: true})
	foreign := build(t, image.Image{Layers: content("riscv"), Platform: imagespec.Platform{OS: "linux", Architecture: "riscv64"}})
	inIndex := build(t, image.Image{Config: config, Layers: content("in index")})
	inList := build(t, image.Image{Config: config, Layers: content("in list"), Docker: true})
	noLayers := build(t, image.Image{Config: config})
	for tag, want := range map[string]struct{ push, image *image.Artifact }{
		"oci":      {oci, oci},
		"docker":   {docker, docker},
		"index":    {index(t, foreign, inIndex), inIndex},
		"list":     {index(t, inList), inList},
		"nolayers": {noLayers, noLayers},
	} {
		r.Push("repo", tag, want.push)
		ref := r.Addr() + "/repo:" + tag
		img := n.pull(ref)
		status, err := n.Image(testContext(t), ref)
		if err != nil || img.ID != want.image.ID() || status.ID != img.ID || byID(n.list(), img.ID) == nil || img.Size == 0 {
			t.Errorf("%s: id %s, status %+v %v, want %s", tag, img.ID, status, err, want.image.ID())
		}
		digests := []string{r.Addr() + "/repo@" + want.image.Digest().String(), r.Addr() + "/repo@" + want.push.Digest().String()}
		if !slices.Equal(img.RepoDigests, sorted(slices.Clone(digests))) {
			t.Errorf("%s: digests %q, want %q", tag, img.RepoDigests, digests)
		}
		for _, digest := range digests {
			if got, err := n.Image(testContext(t), digest); err != nil || got.ID != img.ID {
				t.Errorf("%s by %s: %v, %v", tag, digest, got, err)
			}
		}
	}
	images := n.list()
	if !slices.IsSortedFunc(images, func(a, b *Image) int { return strings.Compare(a.ID, b.ID) }) {
		t.Error("the list is not in a stable order")
	}
	for _, img := range images {
		n.remove(img.ID)
	}
	n.empty()
}

func TestPullByDigest(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "by digest")
	r := serve(t, "repo", "", a)
	exact := r.Addr() + "/repo@" + a.Digest().String()
	for _, ref := range []string{exact, r.Addr() + "/repo:tag@" + a.Digest().String()} {
		img := n.pull(ref)
		if len(img.RepoTags) != 0 || !slices.Equal(img.RepoDigests, []string{exact}) {
			t.Errorf("%s: tags %q, digests %q", ref, img.RepoTags, img.RepoDigests)
		}
	}
	// The content of a digest must have that digest.
	lie := motd(t, "a lie")
	n.remove(exact)
	r.Inject(replaceManifest(lie.Manifest))
	if img, err := n.Pull(testContext(t), PullRequest{Image: exact}); err == nil {
		t.Errorf("took %s for %s", img.ID, exact)
	}
	n.empty()
}

// The tag moves to the new image; the old one stays, without tags and with its digests, until it is
// removed.
func TestTagMoves(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	older, newer := motd(t, "old"), motd(t, "new")
	r := serve(t, "repo", "latest", older)
	tag := r.Addr() + "/repo:latest"
	n.pull(tag)
	r.Push("repo", "latest", newer)
	if img := n.pull(tag); img.ID != newer.ID() || !slices.Equal(img.RepoTags, []string{tag}) {
		t.Errorf("new image %+v", img)
	}
	if img, err := n.Image(testContext(t), tag); err != nil || img.ID != newer.ID() {
		t.Errorf("tag leads to %+v, %v", img, err)
	}
	dangling, err := n.Image(testContext(t), older.ID())
	if err != nil || len(dangling.RepoTags) != 0 || !slices.Equal(dangling.RepoDigests, []string{r.Addr() + "/repo@" + older.Digest().String()}) {
		t.Errorf("old image %+v, %v", dangling, err)
	}
	n.remove(dangling.RepoDigests[0])
	if images := n.list(); len(images) != 1 {
		t.Errorf("%d images", len(images))
	}
	n.remove(tag)
	n.empty()
}

// critest: removing an image by one tag removes all its tags, even those of other registries.
func TestRemoveByOneOfManyTags(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "many names")
	r, other := serve(t, "repo", "1", a), serve(t, "elsewhere", "1", a)
	r.Push("repo", "2", a)
	for _, ref := range []string{r.Addr() + "/repo:1", r.Addr() + "/repo:2", other.Addr() + "/elsewhere:1"} {
		n.pull(ref)
	}
	if images := n.list(); len(images) != 1 || len(images[0].RepoTags) != 3 || len(images[0].RepoDigests) != 2 {
		t.Fatalf("%+v", images)
	}
	n.remove(r.Addr() + "/repo:2")
	n.empty()
}

func TestPullOfPresentImageFetchesNoLayer(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "here already")
	r := serve(t, "repo", "1", a)
	r.Push("repo", "2", a)
	n.pull(r.Addr() + "/repo:1")
	r.Forget()
	img := n.pull(r.Addr() + "/repo:1")
	again := n.pull(r.Addr() + "/repo:2")
	if again.ID != img.ID || len(again.RepoTags) != 2 {
		t.Errorf("%+v", again)
	}
	for _, request := range r.Requests() {
		if strings.Contains(request.Path, "/blobs/") && !strings.Contains(request.Path, a.Config.String()) {
			t.Errorf("fetched %s", request.Path)
		}
	}
}

func TestSharedLayersSurviveTheOtherImage(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	base := layer(t, image.Text("base", "shared"))
	one := build(t, image.Image{Layers: []image.Layer{base, layer(t, image.Text("one", "1"))}})
	two := build(t, image.Image{Layers: []image.Layer{base, layer(t, image.Text("two", "2"))}})
	r := serve(t, "repo", "one", one)
	r.Push("repo", "two", two)
	n.pull(r.Addr() + "/repo:one")
	r.Forget()
	n.pull(r.Addr() + "/repo:two")
	for _, request := range r.Requests() {
		if strings.Contains(request.Path, base.Digest.String()) {
			t.Error("the shared layer was fetched twice")
		}
	}
	n.remove(r.Addr() + "/repo:one")
	root := n.rootfs("c", two.ID())
	n.mount(root)
	if got := n.read(root, "base"); got != "shared" {
		t.Errorf("shared layer holds %q", got)
	}
	n.removeRootfs(root)
	n.remove(two.ID())
	n.empty()
}

// registries.conf: mirrors, remaps, blocks and short names; read at each pull.
func TestRegistriesConf(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "somewhere")
	r := registrytest.Start(t)
	r.Push("mirror/library/app", "1", a)
	r.Push("library/app", "1", a)
	r.Push("app", "1", a)
	dead := "127.0.0.1:1"
	local := insecure("127.0.0.1")
	for _, test := range []struct{ what, conf, ref, tag string }{
		{"remap", registryEntry("docker.io", r.Addr()+"/mirror"), "docker.io/library/app:1", "docker.io/library/app:1"},
		{"remap of a short name", registryEntry("docker.io", r.Addr()+"/mirror"), "app:1", "docker.io/library/app:1"},
		{"mirror before a dead registry",
			registryEntry(dead, dead) + "[[registry.mirror]]\nlocation = \"" + r.Addr() + "\"\ninsecure = true\n",
			dead + "/library/app:1", dead + "/library/app:1"},
		{"dead mirror before the registry",
			registryEntry(r.Addr(), r.Addr()) + "[[registry.mirror]]\nlocation = \"" + dead + "\"\ninsecure = true\n",
			r.Addr() + "/app:1", r.Addr() + "/app:1"},
		{"search", "unqualified-search-registries = [\"" + dead + "\", \"" + r.Addr() + "\"]\n" + local, "app:1", r.Addr() + "/app:1"},
		{"alias", local + "[aliases]\n\"nick\" = \"" + r.Addr() + "/library/app\"\n", "nick:1", r.Addr() + "/library/app:1"},
		{"prefix with a star", registryEntry("*.example.org", r.Addr()+"/mirror/library"), "deep.example.org/app:1", "deep.example.org/app:1"},
	} {
		n.write("registries.conf", test.conf)
		img, err := n.Pull(testContext(t), PullRequest{Image: test.ref})
		if err != nil || !slices.Equal(img.RepoTags, []string{test.tag}) {
			t.Errorf("%s: %+v, %v; want tag %s", test.what, img, err, test.tag)
			continue
		}
		if got, err := n.Image(testContext(t), test.ref); err != nil || got.ID != img.ID {
			t.Errorf("%s: not found by %s: %v", test.what, test.ref, err)
		}
		n.remove(test.ref)
	}

	n.write("registries.conf", local+registryEntry("blocked.example", r.Addr())+"blocked = true\n")
	r.Forget()
	_, err := n.Pull(testContext(t), PullRequest{Image: "blocked.example/app:1"})
	if !errors.Is(err, fault.Denied) || errors.Is(err, ErrSignature) || len(r.Requests()) > 0 {
		t.Errorf("blocked: %v, %d requests", err, len(r.Requests()))
	}
	n.write("registries.conf", "nonsense")
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); !errors.Is(err, fault.Precondition) {
		t.Errorf("broken file: %v", err)
	}
	n.write("registries.conf", "")
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); !errors.Is(err, fault.Unavailable) {
		t.Errorf("http without leave: %v", err)
	}
	n.empty()
}

func registryEntry(prefix, location string) string {
	return fmt.Sprintf("[[registry]]\nprefix = %q\nlocation = %q\ninsecure = true\n", prefix, location)
}

func TestRegistriesConfDropIn(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "x"))
	n.write("registries.conf", "")
	if err := os.Mkdir(n.cfg.RegistriesConf+".d", 0o700); err != nil {
		t.Fatal(err)
	}
	n.write("registries.conf.d/10-local.conf", insecure("127.0.0.1"))
	n.pull(r.Addr() + "/app:1")
}

// The error for a registry without TLS has the line that cures it.
func TestPlainHTTPIsCuredByWhatTheErrorSays(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "x"))
	n.write("registries.conf", "")
	ok(t, os.Mkdir(n.cfg.RegistriesConf+".d", 0o700))
	_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
	said := regexp.MustCompile(`registries\.conf\.d/50-insecure\.conf: (.*\]);`).FindStringSubmatch(fmt.Sprint(err))
	if said == nil {
		t.Fatalf("no line for registries.conf.d in %v", err)
	}
	n.write("registries.conf.d/50-insecure.conf", said[1]+"\n")
	n.pull(r.Addr() + "/app:1")
}

// Each request to a mirror of several registries names the registry, also for attached signatures
// and when a download is resumed; requests to the registry itself do not. Names and downloads of
// one registry have no effect on another behind the same mirror.
func TestMirrorsAreToldTheRegistry(t *testing.T) {
	useAttachments(t)
	n := newNode(t, func(c *Options) { c.HostsDirs = []string{filepath.Join(filepath.Dir(c.Root), "certs.d")} })
	n.write("registries.conf", "")
	hostsFile := func(registry, text string) {
		t.Helper()
		ok(t, os.MkdirAll(filepath.Join(n.dir, "certs.d", registry), 0o755))
		n.write(filepath.Join("certs.d", registry, "hosts.toml"), text)
	}
	mirror := registrytest.StartAt(t, "127.0.0.2:0")
	hostsFile("_default", "server = \"http://127.0.0.1:1\"\n[host.\"http://"+mirror.Addr()+"\"]\n")
	one, other, hub := registry.New(), registry.New(), registry.New()
	mirror.Inject(registry.Fault{Path: "/v2/", Do: registry.Namespaces(map[string]*registry.Registry{"r2.test": one, "q9.test:5000": other, "docker.io": hub})})
	asked := func(of *registry.Registry, namespace string) {
		t.Helper()
		requests := slices.DeleteFunc(of.Requests(), func(r registry.Request) bool { return r.Path == "/v2/" })
		of.Forget()
		if len(requests) < 3 { // manifest, config, layer
			t.Errorf("only %+v", requests)
		}
		for _, r := range requests {
			if query, err := url.ParseQuery(r.Query); err != nil || query.Get("ns") != namespace || len(query["ns"]) > 1 {
				t.Errorf("%s?%s, want the namespace %q, %v", r.Path, r.Query, namespace, err)
			}
		}
	}
	ids := map[string]string{}
	for registryName, in := range map[string]*registry.Registry{"r2.test": one, "q9.test:5000": other, "docker.io": hub} {
		repo := "t"
		if in == hub {
			repo = "library/t"
		}
		a := motd(t, registryName)
		in.Push(repo, "1", a)
		name := registryName + "/" + repo
		for _, ref := range []string{name + ":1", name + "@" + a.Digest().String(), name + ":1"} {
			img := n.pull(ref)
			if ids[registryName] = img.ID; img.ID != a.ID() {
				t.Errorf("%s is %s, want %s", ref, img.ID, a.ID())
			}
			if ref != name+":1" {
				n.remove(img.ID)
			}
			asked(mirror, registryName)
		}
	}
	if len(n.list()) != 3 {
		t.Errorf("%v", n.list())
	}
	for registryName, id := range ids {
		name := registryName + "/t:1"
		if img, err := n.Image(testContext(t), name); err != nil || img.ID != id {
			t.Errorf("%s: %v, %v, want %s", name, img, err, id)
		}
	}
	if _, err := n.Pull(testContext(t), PullRequest{Image: "none.test/t:1"}); err == nil {
		t.Error("pulled from a registry that the mirror does not know")
	}

	// The registry itself, also below a path and in the place of a mirror.
	home := serve(t, "t", "1", motd(t, "home"))
	home.Push("below/t", "1", motd(t, "below"))
	for _, text := range []string{
		"server = \"http://" + home.Addr() + "\"\n",
		"server = \"http://127.0.0.1:1\"\n[host.\"http://" + home.Addr() + "\"]\n",
		"server = \"http://127.0.0.1:1\"\n[host.\"http://" + home.Addr() + "/v2/below\"]\noverride_path = true\n",
	} {
		hostsFile(home.Addr(), text)
		n.remove(n.pull(home.Addr() + "/t:1").ID)
		asked(home, "")
	}
	// Requests to a server under another name contain the registry, as with containerd.
	hostsFile("else.test", "server = \"http://"+home.Addr()+"\"\n")
	n.pull("else.test/t:1")
	asked(home, "else.test")
}

// A download that a mirror for several registries has broken off is resumed for the registry
// that it was for.
func TestMirrorsAreToldTheRegistryOfAResumedDownload(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(c *Options) { c.HostsDirs = []string{filepath.Join(filepath.Dir(c.Root), "certs.d")} })
	mirror, one, other := registrytest.StartAt(t, "127.0.0.2:0"), registry.New(), registry.New()
	ok(t, os.MkdirAll(filepath.Join(n.dir, "certs.d/_default"), 0o755))
	n.write("certs.d/_default/hosts.toml", "server = \"http://127.0.0.1:1\"\n[host.\"http://"+mirror.Addr()+"\"]\n")
	built := noise(t, 4*mega)
	one.Push("t", "1", built)
	other.Push("t", "1", motd(t, "other"))
	namespaces := registry.Namespaces(map[string]*registry.Registry{"r2.test": one, "q9.test": other})
	blob := "/blobs/" + layerDigest(built, 0)
	mirror.Inject(registry.Fault{Path: blob, Times: 1, Do: func(answer http.Handler, stop <-chan struct{}) http.Handler {
		return registry.Reset(mega)(namespaces(answer, stop), stop)
	}})
	mirror.Inject(registry.Fault{Path: blob, Do: registry.Status(http.StatusServiceUnavailable)})
	mirror.Inject(registry.Fault{Path: "/v2/", Do: namespaces})
	if _, err := n.Pull(testContext(t), PullRequest{Image: "r2.test/t:1"}); err == nil {
		t.Fatal("pulled what was cut")
	}
	mirror.Heal()
	mirror.Inject(registry.Fault{Path: "/v2/", Do: namespaces})
	mirror.Forget()
	if img := n.pull("q9.test/t:1"); img.ID == built.ID() {
		t.Error("both registries have the same image")
	}
	mirror.Forget()
	n.pull("r2.test/t:1")
	resumed := slices.DeleteFunc(mirror.Requests(), func(r registry.Request) bool { return !strings.HasSuffix(r.Path, blob) })
	if len(resumed) != 1 || resumed[0].Range == "" || resumed[0].Query != "ns=r2.test" {
		t.Errorf("resumed with %+v", resumed)
	}
}

// containerd's files for a registry are read at every pull.
func TestHostsFiles(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(c *Options) { c.HostsDirs = []string{filepath.Join(filepath.Dir(c.Root), "certs.d")} })
	home, mirror := serve(t, "app", "1", motd(t, "home")), registrytest.StartAt(t, "127.0.0.2:0")
	ref := home.Addr() + "/app:1"
	dir := filepath.Join("certs.d", home.Addr())
	if err := os.MkdirAll(filepath.Join(n.dir, dir), 0o755); err != nil {
		t.Fatal(err)
	}
	n.write("registries.conf", "") // nothing of the registry's plain HTTP
	server := "server = \"http://" + home.Addr() + "\"\n"
	pull := func(mirrored bool) {
		t.Helper()
		mirror.Forget()
		img := n.pull(ref)
		if asked := len(mirror.Requests()) > 0; asked != mirrored || !slices.Equal(img.RepoTags, []string{ref}) {
			t.Errorf("the mirror was asked: %t, want %t; names %q", asked, mirrored, img.RepoTags)
		}
		n.remove(ref)
	}
	n.write(filepath.Join(dir, "hosts.toml"), server)
	pull(false)
	n.write(filepath.Join(dir, "hosts.toml"), server+"[host.\"http://"+mirror.Addr()+"\"]\ncapabilities = [\"pull\", \"resolve\"]\n")
	pull(true) // and then the registry, for it has nothing
	mirror.Push("hub/app", "1", motd(t, "mirror"))
	n.write(filepath.Join(dir, "hosts.toml"), "server = \"http://127.0.0.1:1\"\n[host.\"http://"+mirror.Addr()+"/v2/hub\"]\noverride_path = true\n")
	pull(true) // which is all there is
	n.write("registries.conf", registryEntry(home.Addr(), home.Addr())+"blocked = true\n")
	if _, err := n.Pull(testContext(t), PullRequest{Image: ref}); !errors.Is(err, fault.Denied) {
		t.Errorf("blocked: %v", err)
	}
	n.write("registries.conf", "")
	n.write(filepath.Join(dir, "hosts.toml"), "[host.\"http://m/prefix\"]\n")
	if _, err := n.Pull(testContext(t), PullRequest{Image: ref}); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "hosts.toml") {
		t.Errorf("what cannot be followed: %v", err)
	}
	if left := slices.DeleteFunc(n.entries("run"), func(name string) bool { return !strings.HasPrefix(name, hosts.Prefix) }); len(left) > 0 {
		t.Errorf("left in the run root: %q", left)
	}
}

func TestSignaturePolicy(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(c *Options) { c.SignaturePolicyDir = filepath.Join(filepath.Dir(c.Root), "policies") })
	r := serve(t, "app", "1", motd(t, "x"))
	ref := r.Addr() + "/app:1"
	pull := func(namespace string) error {
		_, err := n.Pull(testContext(t), PullRequest{Image: ref, Namespace: namespace})
		return err
	}
	const reject = `{"default": [{"type": "reject"}]}`

	n.write("policy.json", reject)
	if err := pull("a"); !errors.Is(err, fault.Denied) || !errors.Is(err, ErrSignature) {
		t.Errorf("rejected: %v", err)
	}
	n.write("policy.json", "nonsense")
	if err := pull("a"); !errors.Is(err, fault.Precondition) || !errors.Is(err, ErrSignature) {
		t.Errorf("broken policy: %v", err)
	}
	if err := os.Remove(n.cfg.SignaturePolicy); err != nil {
		t.Fatal(err)
	}
	r.Forget()
	err := pull("a")
	if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "policy.json") || len(r.Requests()) > 0 {
		t.Errorf("no policy: %v, %d requests", err, len(r.Requests()))
	}

	// A namespace of its own, and names that are no file names.
	if err := os.Mkdir(n.cfg.SignaturePolicyDir, 0o700); err != nil {
		t.Fatal(err)
	}
	n.write("policy.json", reject)
	n.write("policies/trusted.json", acceptAll)
	n.write("outside.json", acceptAll)
	for _, namespace := range []string{"", "other", "../outside", "./trusted", "trusted/", "TRUSTED", "trusted.json"} {
		if err := pull(namespace); !errors.Is(err, fault.Denied) {
			t.Errorf("namespace %q: %v", namespace, err)
		}
	}
	if len(n.list()) > 0 {
		t.Error("an image got in")
	}
	if err := pull("trusted"); err != nil {
		t.Errorf("namespace trusted: %v", err)
	}
	// Being here already excuses no image.
	if err := pull("other"); !errors.Is(err, fault.Denied) {
		t.Errorf("present image, namespace other: %v", err)
	}
}

func TestPullErrors(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "x"))
	for ref, want := range map[string]error{
		r.Addr() + "/app:2":                 fault.NotFound,
		r.Addr() + "/none:1":                fault.NotFound,
		r.Addr() + "/app@" + someDigest:     fault.NotFound,
		"127.0.0.1:1/app:1":                 fault.Unavailable,
		"no-such-host.invalid/app:1":        fault.Unavailable,
		"docker-archive:/etc/passwd":        fault.Invalid,
		"containers-storage:" + someDigest:  fault.Invalid,
		"":                                  fault.Invalid,
		strings.Repeat("a", 64):             fault.Invalid,
		r.Addr() + "/app:1@sha256:nonsense": fault.Invalid,
	} {
		img, err := n.Pull(testContext(t), PullRequest{Image: ref})
		if !errors.Is(err, want) {
			t.Errorf("%q: %v, %v; want %v", ref, img, err, want)
		}
	}
	n.empty()
}

func TestNoPlatform(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	foreign := build(t, image.Image{Platform: imagespec.Platform{OS: "linux", Architecture: "riscv64"}})
	r := serve(t, "app", "1", index(t, foreign))
	_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
	if !errors.Is(err, fault.NotFound) {
		t.Errorf("%v", err)
	}
	n.empty()
}

func TestManyPullsAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := registrytest.Start(t)
	base := layer(t, image.Regular("base", 0o644, make([]byte, 1<<20)))
	for i := range 6 {
		r.Push("repo", fmt.Sprint(i), build(t, image.Image{Layers: []image.Layer{base, layer(t, image.Text("own", fmt.Sprint(i)))}}))
	}
	var all sync.WaitGroup
	for i := range 18 { // each image by three callers
		all.Go(func() {
			if _, err := n.Pull(testContext(t), PullRequest{Image: fmt.Sprintf("%s/repo:%d", r.Addr(), i%6)}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	images := n.list()
	if len(images) != 6 {
		t.Errorf("%d images", len(images))
	}
	for _, img := range images {
		n.remove(img.ID)
	}
	n.empty()
}

// An image that lost a layer is not listed, and the next pull makes it whole.
func TestLostLayerHeals(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "whole again")
	r := serve(t, "app", "1", a)
	ref := r.Addr() + "/app:1"
	img := n.pull(ref)
	dirs, err := durable.UsableLayers(n.store, img.topLayer)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Dir(dirs[1])); err != nil {
		t.Fatal(err)
	}
	n.restart() // what is known of an image is checked once per process
	if images := n.list(); len(images) != 0 {
		t.Errorf("a damaged image is listed: %+v", images)
	}
	n.pull(ref)
	root := n.rootfs("c", a.ID())
	n.mount(root)
	if n.read(root, "etc/hostname") != "base\n" || n.read(root, "etc/motd") != "whole again" {
		t.Error("the image is not whole")
	}
	n.removeRootfs(root)
	n.remove(ref)
	n.empty()
}

// TestLostLayerIsNoticed: a server that runs while layers or their records vanish learns of it from
// the first container, and the kubelet from the list of images, so that it pulls again
// (cri-o#4285, okd#297: layer not known).
func TestLostLayerIsNoticed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.holds.grace = 0
	ref := serve(t, "app", "1", motd(t, "whole again")).Addr() + "/app:1"
	img := n.pull(ref)
	for what, lose := range map[string]func(id string){
		"directory": func(id string) { remove(t, filepath.Dir(n.diff(id))) },
		"record":    n.loseRecord,
	} {
		for _, id := range n.chain(img) { // whichever layer it is
			lose(id)
			root := n.rootfs("c-"+id[:4], img.ID)
			if err := n.MountRootfs(testContext(t), root); !errors.Is(err, durable.ErrLayersLost) || !errors.Is(err, fault.NotFound) {
				t.Errorf("mount without a %s: %v", what, err)
			}
			n.removeRootfs(root)
			if images := n.list(); len(images) != 0 {
				t.Errorf("a damaged image is listed: %+v", images)
			}
			n.pull(ref)
			n.mount(root)
			n.removeRootfs(root)
		}
	}
}

// loseRecord has the record of a layer vanish, as if another program had written the records
// without it.
func (n *node) loseRecord(id string) {
	n.t.Helper()
	n.editLayers(func(layers []map[string]any) []map[string]any {
		return slices.DeleteFunc(layers, func(layer map[string]any) bool { return layer["id"] == id })
	})
	n.othersWrite()
}

// An image that is about to be deleted for its lost layers is checked once more: another program
// may have repaired it. An image that was made here is left to a person.
func TestLostImagesAreLookedAtAgain(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	if err := n.dropIfLost(testContext(t), img.ID); err != nil {
		t.Error(err)
	}
	if images := n.list(); len(images) != 1 {
		t.Fatalf("a sound image was deleted: %+v", images)
	}
	local, err := n.store.CreateImage("", []string{"localhost/built:1"}, img.topLayer, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	dirs, err := durable.UsableLayers(n.store, img.topLayer)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dirs[0]); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{img.ID, local.ID} {
		if err := n.dropIfLost(testContext(t), id); err != nil {
			t.Error(err)
		}
		if _, err := n.store.Image(id); (err == nil) != (id == local.ID) {
			t.Errorf("image %s: %v", id, err)
		}
	}
}

// A removed image is off the list at once, even if another program has the lock
// of the records.
func TestRemovedImageIsNotListedUnderLock(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "one"))
	r.Push("app", "2", motd(t, "two"))
	gone, stays := n.pull(r.Addr()+"/app:1"), n.pull(r.Addr()+"/app:2")
	n.list()
	ok(t, n.Remove(testContext(t), gone.ID))
	defer n.child("lock").kill()
	if images := n.list(); len(images) != 1 || images[0].ID != stays.ID {
		t.Errorf("listed are %+v", images)
	}
}

// lastWrite calls before when all but the last bytes of an answer have been sent: a client that has
// them may already ask for something else.
type lastWrite struct {
	http.ResponseWriter
	before func()
	sent   int
}

func (w *lastWrite) Write(p []byte) (int, error) {
	if w.sent += len(p); strconv.Itoa(w.sent) == w.Header().Get("Content-Length") {
		w.before()
	}
	return w.ResponseWriter.Write(p)
}

// Unwrap is for http.ResponseController, by which answers are flushed.
func (w *lastWrite) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func TestParallelLayers(t *testing.T) {
	t.Parallel()
	for _, parallel := range []int{1, 3} {
		n := newNode(t, func(c *Options) { c.ParallelLayers = parallel })
		app := noise(t, 50<<10, 50<<10, 50<<10, 50<<10, 50<<10, 50<<10)
		r := serve(t, "app", "1", app)
		var mu sync.Mutex
		now, most, full := 0, 0, make(chan struct{})
		reached := sync.OnceFunc(func() { close(full) })
		count := func(change int) {
			mu.Lock()
			defer mu.Unlock()
			now += change
			if most = max(most, now); now == parallel {
				reached()
			}
		}
		r.Inject(registry.Fault{Path: "/blobs/", Do: func(answer http.Handler, stop <-chan struct{}) http.Handler {
			slow := registry.Slow(200<<10)(answer, stop)
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if strings.HasSuffix(req.URL.Path, app.Config.String()) {
					answer.ServeHTTP(w, req)
					return
				}
				count(1)
				end := sync.OnceFunc(func() { count(-1) })
				defer end()
				select { // the first layer waits for those that are to come with it
				case <-full:
				case <-stop:
				}
				slow.ServeHTTP(&lastWrite{ResponseWriter: w, before: end}, req)
			})
		}})
		n.pull(r.Addr() + "/app:1")
		mu.Lock() // the last answer may still be on its way out
		defer mu.Unlock()
		if most != parallel {
			t.Errorf("%d layers at once, want %d", most, parallel)
		}
	}
}

// What has been inspected is not asked for again: the registry could answer
// differently the second time.
func TestPullAsksForEachDocumentOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", index(t, motd(t, "x")))
	n.pull(r.Addr() + "/app:1")
	asked := map[string]int{}
	for _, request := range r.Requests() {
		if request.Path != "/v2/" {
			asked[request.Path]++
		}
	}
	if len(asked) != 5 { // index, manifest, config, two layers
		t.Errorf("%d documents: %v", len(asked), asked)
	}
	for path, times := range asked {
		if times != 1 {
			t.Errorf("%s: asked for %d times", path, times)
		}
	}
}

// Only pulls that brought an image count: how long it takes to see that one is there says nothing of its size.
func TestDurationsOfPullsBySize(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	repo := testRepo()
	name := serve(t, repo, "1", motd(t, "x")).Addr() + "/" + repo + ":1"
	n.pull(name)
	n.pull(name)
	n.Pulls().Took.BySize(func(class string, h progress.Histogram) {
		if want := map[string]uint64{"0-10MB": 1}[class]; h.Count != want || want > 0 && h.Sum <= 0 {
			t.Errorf("%s: %d pulls in %s, want %d", class, h.Count, h.Sum, want)
		}
	})
}
