package storage

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
	"github.com/crius-run/crius/test/kit/wait"
)

func files(t testing.TB, f image.Files) *image.Artifact {
	t.Helper()
	a, err := f.Build()
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func model(t testing.TB, text string) *image.Artifact {
	t.Helper()
	return files(t, image.Files{"config.json": "{}", "weights/part-1": text, "weights/part-2": "shared", "copy": "shared", "empty": ""})
}

// blobs are the names of the content that the node has of artifacts.
func (n *node) blobs() []string { return n.entries("root/crius-artifacts/blobs") }

// noArtifacts fails the test if anything is left of artifacts.
func (n *node) noArtifacts() {
	n.t.Helper()
	for _, dir := range []string{"artifacts", "blobs", "pending"} {
		if left := n.entries("root/crius-artifacts/" + dir); len(left) > 0 {
			n.t.Errorf("left in %s: %q", dir, left)
		}
	}
}

func (n *node) volume(name, id string) Rootfs {
	r := n.rootfs(name, id)
	r.ReadOnly = true
	return r
}

func (n *node) used() uint64 {
	n.t.Helper()
	images, _, err := n.FsInfo(testContext(n.t))
	if err != nil {
		n.t.Fatal(err)
	}
	return images.UsedBytes
}

func TestArtifactIsPulledListedMountedAndRemoved(t *testing.T) {
	t.Parallel()
	a := model(t, "weights")
	n := newNode(t, func(c *Options) { c.PinnedImages = []string{"*pinned*"} })
	r := serve(t, "models/one", "1", a)
	name := r.Addr() + "/models/one"
	img := n.pull(name + ":1")
	size := diskUse(t, filepath.Join(n.cfg.Root, "crius-artifacts/artifacts", img.ID)) // each content once
	if img.ID != a.Digest().Encoded() || !slices.Equal(img.RepoTags, []string{name + ":1"}) || img.Pinned || img.Size != size ||
		!slices.Equal(img.RepoDigests, []string{name + "@" + a.Digest().String()}) || len(img.Files) != 5 {
		t.Errorf("pulled %+v", img)
	}
	n.restart()
	image := n.pull(serve(t, "app", "1", motd(t, "an image")).Addr() + "/app:1")
	if list := n.list(); len(list) != 2 || byID(list, img.ID) == nil || byID(list, image.ID) == nil {
		t.Errorf("listed %+v", list)
	}
	for _, ref := range []string{img.ID, "sha256:" + img.ID, name + ":1", name + "@" + a.Digest().String()} {
		if got, err := n.Image(testContext(t), ref); err != nil || got.ID != img.ID || got.Size != img.Size {
			t.Errorf("%s: %v, %v", ref, got, err)
		}
	}
	r.Push("models/pinned", "1", a)
	if again := n.pull(r.Addr() + "/models/pinned:1"); again.ID != img.ID || !again.Pinned || len(again.RepoTags) != 2 {
		t.Errorf("pulled under another name: %+v", again)
	}
	v := n.volume("v", img.ID)
	n.mount(v)
	for file, want := range map[string]string{"config.json": "{}", "weights/part-1": "weights", "weights/part-2": "shared", "copy": "shared", "empty": ""} {
		if got := n.read(v, file); got != want {
			t.Errorf("%s has %q, want %q", file, got, want)
		}
	}
	if err := os.WriteFile(filepath.Join(v.Target, "copy"), nil, 0o600); err == nil {
		t.Error("a file could be written")
	}
	if defects, err := n.Verify(testContext(t), []Rootfs{v}); err != nil || len(defects) > 0 {
		t.Errorf("verified: %+v, %v", defects, err)
	}
	n.removeRootfs(v)
	before := n.used()
	n.background.Wait()
	n.remove(name + ":1")
	if freed := before - n.used(); freed != size {
		t.Errorf("ImageFsInfo went down by %d bytes", freed)
	}
	n.noArtifacts()
	n.remove(img.ID)
	n.remove(image.ID)
	n.empty()
}

// Content is there once, whatever has it, and is not fetched again.
func TestArtifactsShareContent(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	one, two := model(t, "one"), model(t, "two")
	r := serve(t, "m", "1", one)
	r.Push("m", "2", two)
	first := n.pull(r.Addr() + "/m:1")
	r.Forget()
	second := n.pull(r.Addr() + "/m:2")
	if got := blobRequests(r); !slices.Equal(got, []string{digest.FromString("two").String()}) {
		t.Errorf("fetched %q for the second one", got)
	}
	if got := n.blobs(); len(got) != 5 {
		t.Errorf("stored %q", got)
	}
	n.remove(first.ID)
	v := n.volume("v", second.ID)
	n.mount(v)
	if n.read(v, "weights/part-1") != "two" || n.read(v, "copy") != "shared" {
		t.Error("the second artifact lost content with the first one")
	}
	n.removeRootfs(v)
	n.remove(second.ID)
	n.noArtifacts()
}

func blobRequests(r *registry.Registry) (digests []string) {
	for _, request := range r.Requests() {
		if _, d, ok := strings.Cut(request.Path, "/blobs/"); ok {
			digests = append(digests, d)
		}
	}
	return digests
}

// Content that has as many links as the file system takes is fetched once more, and shared
// from then on. Where a file system takes more than ext4 it is shared without that.
func TestArtifactsBeyondTheLimitOfLinks(t *testing.T) {
	t.Parallel()
	disk, err := os.MkdirTemp("/var/tmp", "crius-links-") // memory takes any number
	ok(t, err)
	t.Cleanup(func() { ok(t, os.RemoveAll(disk)) })
	n := newNode(t, func(c *Options) { c.Root = filepath.Join(disk, "root") })
	r := serve(t, "m", "1", model(t, "one"))
	r.Push("m", "2", model(t, "two"))
	r.Push("m", "3", model(t, "three"))
	n.pull(r.Addr() + "/m:1")
	shared := filepath.Join(n.cfg.Root, "crius-artifacts/blobs/sha256-"+digest.FromString("shared").Encoded())
	again := []string{"two"}
	for i := range 65_000 { // of ext4
		err := os.Link(shared, filepath.Join(disk, strconv.Itoa(i)))
		if errors.Is(err, unix.EMLINK) {
			ok(t, os.Remove(filepath.Join(disk, "0"))) // there is room for one of two files
			again = append(again, "shared")
			break
		}
		ok(t, err)
	}
	for i, want := range [][]string{again, {"three"}} {
		tag := strconv.Itoa(i + 2)
		r.Forget()
		v := n.volume("v"+tag, n.pull(r.Addr()+"/m:"+tag).ID)
		n.mount(v)
		if n.read(v, "copy") != "shared" || n.read(v, "weights/part-2") != "shared" {
			t.Errorf("content of m:%s differs", tag)
		}
		n.removeRootfs(v)
		for i := range want {
			want[i] = digest.FromString(want[i]).String()
		}
		if got := blobRequests(r); !slices.Equal(sorted(got), sorted(want)) {
			t.Errorf("fetched %q for m:%s", got, tag)
		}
	}
}

// An artifact stays as long as a container mounts it, whatever server is asked to remove it.
func TestArtifactInUseIsNotRemoved(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	name := serve(t, "m", "1", model(t, "weights")).Addr() + "/m:1"
	img := n.pull(name)
	one, two := n.volume("one", img.ID), n.volume("two", img.ID)
	two.ID += "-volume-0"
	n.mount(one)
	n.mount(two)
	n.keepsInUse(img.ID, 2, one)
	n.restart()
	ok(t, n.Adopt(testContext(t), []Rootfs{one, two}))
	n.keepsInUse(img.ID, 2, one)
	n.removeRootfs(one)
	n.keepsInUse(img.ID, 1, two)
	if got := n.read(two, "copy"); got != "shared" {
		t.Errorf("it has %q", got)
	}
	n.removeRootfs(two)
	n.remove(name)
	n.noArtifacts()
}

// The type of the config decides whether something is an artifact and, if that is an image's,
// whether it can be run.
func TestWhatIsAnArtifact(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := registrytest.Start(t)
	changed := func(a *image.Artifact, change func(m map[string]any)) *image.Artifact {
		a.Manifest = changedJSON(t, a.Manifest, change)
		return a
	}
	config := func(mediaType string) func(m map[string]any) {
		return func(m map[string]any) { m["config"].(map[string]any)["mediaType"] = mediaType }
	}
	annotation := func(key string) func(m map[string]any) {
		return func(m map[string]any) {
			for _, l := range m["layers"].([]any) {
				l := l.(map[string]any)
				l["annotations"] = map[string]any{key: l["annotations"].(map[string]any)[imagespec.AnnotationTitle]}
			}
		}
	}
	for what, c := range map[string]struct {
		pushed *image.Artifact
		files  int
	}{
		"ORAS":                       {model(t, "oras"), 5},
		"in an index":                {index(t, model(t, "index")), 5},
		"type of its config":         {changed(model(t, "helm"), config("application/vnd.cncf.helm.config.v1+json")), 5},
		"ModelPack":                  {changed(model(t, "modelpack"), annotation("org.cncf.model.filepath")), 5},
		"ModelPack's earlier names":  {changed(model(t, "cnai"), annotation("org.cnai.model.filepath")), 5},
		"config of an image":         {changed(files(t, image.Files{"a": "a"}), config(imagespec.MediaTypeImageConfig)), 1},
		"image":                      {motd(t, "image"), 0},
		"image with an artifactType": {changed(motd(t, "typed"), func(m map[string]any) { m["artifactType"] = "application/x" }), 0},
		"a layer without a name": {changed(model(t, "nameless"), func(m map[string]any) {
			delete(m["layers"].([]any)[0].(map[string]any), "annotations")
		}), 4},
	} {
		r.Push("m", "1", c.pushed)
		img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/m:1"})
		if err != nil || len(img.Files) != c.files {
			t.Errorf("%s: %+v, %v", what, img, err)
		}
	}
}

// The author of an artifact chooses the names of its files.
func TestHostileArtifacts(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := registrytest.Start(t)
	layers := func(m map[string]any) []any { return m["layers"].([]any) }
	first := func(m map[string]any) map[string]any { return layers(m)[0].(map[string]any) }
	named := func(name string) func(m map[string]any) {
		return func(m map[string]any) { first(m)["annotations"].(map[string]any)[imagespec.AnnotationTitle] = name }
	}
	for what, change := range map[string]func(m map[string]any){
		"absolute":             named("/etc/passwd"),
		"climbs":               named("../x"),
		"climbs later":         named("a/../../x"),
		"the artifact itself":  named("."),
		"directory above":      named(".."),
		"control character":    named("a\x1b[31m"),
		"NUL":                  named("a\x00b"),
		"long part":            named(strings.Repeat("a", 256)),
		"long path":            named(strings.Repeat("abc/", 300) + "x"),
		"deep":                 named(strings.Repeat("a/", 40) + "x"),
		"twice":                named("empty"),
		"twice, written apart": named("./weights//../empty"),
		"file and directory":   named("weights"),
		"directory and file":   named("empty/x"),
		"no names": func(m map[string]any) {
			for _, l := range layers(m) {
				delete(l.(map[string]any), "annotations")
			}
		},
		"no layers": func(m map[string]any) { m["layers"] = []any{} },
		"too many":  func(m map[string]any) { m["layers"] = slices.Repeat(layers(m)[:1], source.MaxFiles+1) },
		"many directories": func(m map[string]any) {
			for i := range 40 {
				layer := maps.Clone(first(m))
				layer["annotations"] = map[string]any{imagespec.AnnotationTitle: fmt.Sprint(i, strings.Repeat("/a", 30))}
				m["layers"] = append(layers(m), layer)
			}
		},
		"negative size": func(m map[string]any) { first(m)["size"] = -1 },
		"digest climbs": func(m map[string]any) { first(m)["digest"] = "sha256:../../../etc/passwd" },
		"foreign":       func(m map[string]any) { first(m)["urls"] = []any{"http://127.0.0.1/x"} },
	} {
		a := model(t, "weights")
		a.Manifest = changedJSON(t, a.Manifest, change)
		r.Push("m", "1", a)
		r.Forget()
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/m:1"})
		if !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", what, err)
		}
		if got := blobRequests(r); len(got) > 0 {
			t.Errorf("%s: fetched %q", what, got)
		}
	}
	n.noArtifacts()
	n.empty()
}

// A registry that sends something else, or nothing, leaves nothing.
func TestArtifactContentIsVerified(t *testing.T) {
	t.Parallel()
	content := random(100_000)
	size := int64(len(content))
	for what, c := range map[string]struct {
		do   registry.Action
		size int64
		want string
		kind error
	}{
		"other content": {registry.Replace(registry.Corrupt), size, "digest", fault.Unavailable},
		"a page":        {registry.Page(http.StatusOK), size, "the answer is a web page", fault.Unavailable},
		"less":          {registry.Replace(registry.Truncate), size, "bytes instead of the 100000 in the manifest", fault.Unavailable},
		"more":          {registry.Slow(1 << 30), size - 1, "another digest", fault.Unavailable},
		"no room":       {registry.Slow(1 << 30), 1 << 60, "free space", fault.Exhausted},
		"stalled":       {registry.Stall(50_000), size, "no data", fault.Timeout},
		"gone":          {registry.Status(http.StatusNotFound), size, "", fault.NotFound},
	} {
		n := newNode(t, func(o *Options) {
			if errors.Is(c.kind, fault.Timeout) {
				o.ProgressTimeout, o.MinPullRate = time.Second, 0 // it must be stalled, and never too slow before that
			}
		})
		a := files(t, image.Files{"a": "first", "b": string(content), "c": string(content)})
		a.Manifest = changedJSON(t, a.Manifest, func(m map[string]any) {
			for _, l := range m["layers"].([]any)[1:] {
				l.(map[string]any)["size"] = c.size
			}
		})
		r := serve(t, "m", "1", a)
		r.Inject(registry.Fault{Path: "/blobs/" + digest.FromBytes(content).String(), Do: c.do})
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/m:1"})
		if err == nil || !strings.Contains(err.Error(), c.want) || !errors.Is(err, c.kind) {
			t.Errorf("%s: %v, want %q in it", what, err, c.want)
		}
		n.noArtifacts()
		if active := n.Pulls().Active(); len(active) > 0 {
			t.Errorf("%s: still pulling: %+v", what, active)
		}
	}
}

// A size that the content does not have is refused, too, where the content is there already.
func TestArtifactSizesAreThoseOfTheContent(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "m", "1", model(t, "weights"))
	wrong := func(m map[string]any) { m["layers"].([]any)[1].(map[string]any)["size"] = 3 } // of copy
	refused := func(when string) {
		if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/m:wrong"}); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", when, err)
		}
	}
	a := model(t, "weights")
	a.Manifest = changedJSON(t, a.Manifest, wrong)
	r.Push("m", "wrong", a)
	img := n.pull(r.Addr() + "/m:1")
	refused("content that is there")
	v := n.volume("v", img.ID)
	n.mount(v)
	if got := n.read(v, "copy"); got != "shared" {
		t.Errorf("the other artifact has %q", got)
	}
	n.removeRootfs(v)
	n.remove(img.ID)
	n.noArtifacts()
	a.Manifest = changedJSON(t, a.Manifest, func(m map[string]any) { slices.Reverse(m["layers"].([]any)) }) // the right size first
	r.Push("m", "wrong", a)
	refused("two sizes in one manifest")
	n.noArtifacts()
}

// What a killed server has fetched is not fetched again, whether a file was whole or not.
func TestKilledPullOfArtifact(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	whole, part := string(random(mega)), string(random(4*mega))
	r := serve(t, "m", "1", files(t, image.Files{"dir/whole": whole, "dir/same": whole, "part": part}))
	r.Inject(registry.Fault{Path: digest.FromString(part).String(), Do: registry.Stall(3 * mega)})
	ok(t, n.Close(testContext(t)))
	c := n.child("pull", r.Addr()+"/m:1")
	wait.For(t, "a whole file and a part of the other", func() bool {
		sum, _ := kept(t, n.cfg.Root)
		return sum > 2*mega && n.arrived() == 2
	})
	c.kill()
	n.open()
	n.noArtifacts()
	if list := n.list(); len(list) > 0 {
		t.Errorf("listed %+v", list)
	}
	here, _ := kept(t, n.cfg.Root)
	r.Heal()
	r.Forget()
	img := n.pull(r.Addr() + "/m:1")
	if sent := r.Sent(digest.FromString(whole).String()); sent != 1 {
		t.Errorf("%d bytes of a whole file were sent, want one, by which the registry agrees", sent)
	}
	if sent := r.Sent(digest.FromString(part).String()); sent != 5*mega-here {
		t.Errorf("%d bytes were sent, want the %d that were missing", sent, 5*mega-here)
	}
	v := n.volume("v", img.ID)
	n.mount(v)
	if n.read(v, "dir/whole") != whole || n.read(v, "dir/same") != whole || n.read(v, "part") != part {
		t.Error("the files have other content")
	}
	n.removeRootfs(v)
	n.remove(img.ID)
	n.noArtifacts()
	if _, files := kept(t, n.cfg.Root); len(files) > 0 {
		t.Errorf("left: %q", files)
	}
}

// arrived counts the files of pulls under way.
func (n *node) arrived() (files int) {
	n.t.Helper()
	err := filepath.WalkDir(filepath.Join(n.cfg.Root, "crius-artifacts/pending"), func(_ string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			files++
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	ok(n.t, err)
	return files
}

// The content of an artifact is on the disk once, from the first byte on, and has no other
// names than those of the store.
func TestArtifactIsNotCopied(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	content := string(random(2 * mega))
	r := serve(t, "one", "1", files(t, image.Files{"model": content}))
	n.failPull(r, "one:1", digest.FromString(content).String())
	_, parts := kept(t, n.cfg.Root)
	if len(parts) != 1 {
		t.Fatalf("kept: %q", parts)
	}
	before, err := os.Stat(parts[0])
	ok(t, err)
	img := n.pull(r.Addr() + "/one:1")
	file := filepath.Join(n.cfg.Root, "crius-artifacts/artifacts", img.ID, "files/model")
	after, err := os.Stat(file)
	ok(t, err)
	if !os.SameFile(before, after) || after.Mode().Perm() != 0o444 {
		t.Errorf("%v is not the file that came, %v", after, before)
	}
	var st unix.Stat_t
	ok(t, unix.Stat(file, &st))
	if st.Nlink != 2 {
		t.Errorf("the file has %d names, want that of the artifact and that of the content", st.Nlink)
	}
}

// Downloads that failed pulls have left make room for an artifact that fits without them alone,
// and count as room for their own. One that does not fit has nothing deleted, its own neither.
func TestArtifactMakesRoom(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	dir := filepath.Join(n.cfg.Root, "crius-artifacts")
	mkdir(t, dir)
	ok(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4m"))
	t.Cleanup(func() { ok(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	left, fits := string(random(mega*13/4)), string(random(mega*7/2))
	r := serve(t, "m", "left", files(t, image.Files{"model": left}))
	r.Push("m", "large", files(t, image.Files{"model": left, "more": string(random(5 * mega))}))
	r.Push("m", "fits", files(t, image.Files{"model": fits}))
	n.failPull(r, "m:left", digest.FromString(left).String())
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/m:large"}); !errors.Is(err, fault.Exhausted) {
		t.Errorf("%v", err)
	}
	if _, files := kept(t, n.cfg.Root); len(files) != 1 {
		t.Errorf("kept %q while it was of no use to delete it", files)
	}
	n.remove(n.pull(r.Addr() + "/m:left").ID) // for which there is no room but that of its beginning
	n.failPull(r, "m:left", digest.FromString(left).String())
	n.remove(n.pull(r.Addr() + "/m:fits").ID)
}

// A power cut leaves a pull, a change of names or a removal unfinished on the disk. The next start
// finishes them, and earlier artifacts are there.
func TestPowerCutAmidArtifacts(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		cut    func(store, id string) error
		listed bool
	}{
		"a pull has some files": {func(store, _ string) error {
			pending := filepath.Join(store, "pending/pull-1/files/weights")
			return errors.Join(os.MkdirAll(pending, 0o755), os.WriteFile(filepath.Join(store, "blobs/sha256-"+strings.Repeat("1", 64)), nil, 0o444),
				os.Link(filepath.Join(store, "blobs/sha256-"+strings.Repeat("1", 64)), filepath.Join(pending, "part-1")),
				os.WriteFile(filepath.Join(store, "pending/pull-1/part-1"), []byte("half"), 0o600))
		}, true},
		"a pull has its place, and its content no names": {func(store, _ string) error {
			return errors.Join(os.RemoveAll(filepath.Join(store, "blobs")), os.Mkdir(filepath.Join(store, "blobs"), 0o700))
		}, true},
		"a record is half written": {func(store, id string) error {
			return os.WriteFile(filepath.Join(store, "artifacts", id, "record.json.new"), []byte(`{"names"`), 0o600)
		}, true},
		"a removal has begun": {func(store, id string) error {
			aside := filepath.Join(store, "pending/removed-"+id)
			return errors.Join(os.Rename(filepath.Join(store, "artifacts", id), aside), os.Remove(filepath.Join(aside, "files/copy")))
		}, false},
		"a pull of what was removed has not begun": {func(store, id string) error {
			return errors.Join(os.RemoveAll(filepath.Join(store, "artifacts", id)), os.RemoveAll(filepath.Join(store, "pending")))
		}, false},
	} {
		n := newNode(t, synced)
		r := serve(t, "m", "1", model(t, "one"))
		r.Push("m", "2", model(t, "one"))
		id := n.pull(r.Addr() + "/m:1").ID
		n.cutPower(false, func() { ok(t, c.cut(filepath.Join(n.cfg.Root, "crius-artifacts"), id)) })
		ok(t, n.Adopt(testContext(t), nil))
		if listed := len(n.list()) == 1; listed != c.listed {
			t.Errorf("%s: listed %+v", what, n.list())
		}
		if !c.listed {
			n.noArtifacts()
		}
		if again := n.pull(r.Addr() + "/m:2"); again.ID != id || len(n.list()) != 1 {
			t.Errorf("%s: pulled %+v", what, again)
		}
		v := n.volume("v", id)
		n.mount(v)
		if got := n.read(v, "weights/part-1"); got != "one" {
			t.Errorf("%s: the file has %q", what, got)
		}
		n.removeRootfs(v)
		n.remove(id)
		n.noArtifacts()
	}
}

// Pulls of one artifact under several names and with several credentials fetch it once.
func TestConcurrentPullsOfOneArtifact(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := model(t, "weights")
	r := registrytest.Start(t)
	var pulls sync.WaitGroup
	for i := range 8 {
		repo := fmt.Sprint("m", i%4)
		r.Push(repo, "1", a)
		pulls.Go(func() {
			auth := &cri.AuthConfig{Username: fmt.Sprint("user", i), Password: "secret"}
			img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/" + repo + ":1", Auth: auth})
			if err != nil || img.ID != a.Digest().Encoded() {
				t.Errorf("pulled %+v, %v", img, err)
			}
		})
	}
	pulls.Wait()
	if got := blobRequests(r); len(got) != 4 {
		t.Errorf("fetched %q", got)
	}
	if list := n.list(); len(list) != 1 || len(list[0].RepoTags) != 4 {
		t.Errorf("listed %+v", list)
	}
	n.remove(a.Digest().Encoded())
	n.noArtifacts()
}

// A registry that sends nothing delays no pull of the artifact from another one. When it does send,
// the artifact in use stays as it is.
func TestSlowRegistryKeepsNobodyWaiting(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	slow, fast := serve(t, "m", "1", model(t, "weights")), serve(t, "m", "1", model(t, "weights"))
	sends := make(chan struct{})
	slow.Inject(registry.Fault{Path: digest.FromString("weights").String(), Do: func(answer http.Handler, stop <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			select {
			case <-sends:
			case <-stop:
			}
			answer.ServeHTTP(w, req)
		})
	}})
	pulled := make(chan error)
	go func() {
		_, err := n.Pull(testContext(t), PullRequest{Image: slow.Addr() + "/m:1"})
		pulled <- err
	}()
	wait.For(t, "the other files", func() bool { return n.arrived() == 4 })
	img := n.pull(fast.Addr() + "/m:1")
	v := n.volume("v", img.ID)
	n.mount(v)
	close(sends)
	ok(t, <-pulled)
	if got := n.read(v, "weights/part-1"); got != "weights" {
		t.Errorf("a file in use has %q", got)
	}
	for range 2 {
		if list := n.list(); len(list) != 1 || len(list[0].RepoTags) != 2 {
			t.Errorf("listed %+v", list)
		}
		if left := n.entries("root/crius-artifacts/pending"); len(left) > 0 {
			t.Errorf("left of the pulls: %q", left)
		}
		n.restart()
	}
	n.removeRootfs(v)
	n.remove(img.ID)
	n.noArtifacts()
}

// A tag that moves from an image to an artifact, to another one and back is the last
// one's.
func TestTagMovesBetweenImageAndArtifact(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := registrytest.Start(t)
	name := r.Addr() + "/m:1"
	var ids []string
	for _, a := range []*image.Artifact{motd(t, "image"), model(t, "one"), model(t, "two"), motd(t, "image")} {
		r.Push("m", "1", a)
		img := n.pull(name)
		for range 2 {
			if got, err := n.Image(testContext(t), name); err != nil || got.ID != img.ID {
				t.Errorf("%s is %+v, %v, want %s", name, got, err, img.ID)
			}
			for _, other := range n.list() {
				if tagged := slices.Contains(other.RepoTags, name); tagged != (other.ID == img.ID) {
					t.Errorf("%s has the tags %q", other.ID, other.RepoTags)
				}
				if len(other.RepoDigests) == 0 {
					t.Errorf("%s has no digest any more", other.ID)
				}
			}
			n.restart()
		}
		ids = append(ids, img.ID)
	}
	for _, id := range ids {
		n.remove(id)
	}
	n.noArtifacts()
	n.empty()
}

// A name that a crash has left to both an image and an artifact means neither, until it is
// pulled again.
func TestNameOfImageAndArtifact(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "m", "1", motd(t, "image"))
	r.Push("m", "2", model(t, "weights"))
	one, two := r.Addr()+"/m:1", r.Addr()+"/m:2"
	img, a := n.pull(one), n.pull(two)
	ok(t, n.Close(testContext(t)))
	record := filepath.Join(n.cfg.Root, "crius-artifacts/artifacts", a.ID, "record.json")
	text, err := os.ReadFile(record)
	ok(t, err)
	ok(t, os.WriteFile(record, changedJSON(t, text, func(m map[string]any) { m["names"] = []string{one, two} }), 0o600))
	n.open()
	for range 2 {
		if got, err := n.Image(testContext(t), one); !errors.Is(err, fault.NotFound) {
			t.Errorf("%s means %+v, %v", one, got, err)
		}
		if got, err := n.Image(testContext(t), two); err != nil || got.ID != a.ID {
			t.Errorf("%s means %+v, %v", two, got, err)
		}
		if list := n.list(); len(list) != 2 || len(byID(list, img.ID).RepoDigests) == 0 {
			t.Errorf("listed %+v", list)
		}
		n.restart()
	}
	if got := n.pull(one); got.ID != img.ID || !slices.Equal(got.RepoTags, []string{one}) {
		t.Errorf("pulled %+v", got)
	}
	n.remove(one)
	n.remove(two)
	n.noArtifacts()
	n.empty()
}

// Signature policies are asked about artifacts as about images, when they are pulled and
// when they are mounted.
func TestSignedArtifacts(t *testing.T) {
	t.Parallel()
	for _, s := range []signer{newSigstoreSigner(t), newGPGSigner(t)} {
		n := policies(t, `{"default": [`+s.rule("matchExact")+`]}`)
		repo, signed, unsigned := testRepo(), model(t, "signed"), model(t, "unsigned")
		r := serve(t, repo, "signed", signed)
		r.Push(repo, "unsigned", unsigned)
		name := r.Addr() + "/" + repo
		lookaside(t, repo, signed.Digest(), 1, s.sign(name+":signed", signed.Digest()))
		lax := n.pull(name + ":unsigned")
		img, err := n.Pull(testContext(t), PullRequest{Image: name + ":signed", Namespace: "strict"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := n.Pull(testContext(t), PullRequest{Image: name + ":unsigned", Namespace: "strict"}); !errors.Is(err, ErrSignature) {
			t.Errorf("pulled without a signature: %v", err)
		}
		for range 2 {
			ok(t, os.RemoveAll(filepath.Join(n.cfg.Root, "crius-artifacts/pending"))) // nothing is written to the disk
			ok(t, os.WriteFile(filepath.Join(n.cfg.Root, "crius-artifacts/pending"), nil, 0o600))
			n.wantAdmitted(img, name+":signed")
			n.wantAdmitted(img, img.ID)
			n.wantRefused(lax, name+":unsigned", "requires a signature")
			n.wantRefused(lax, name+":signed", "was not pulled as")
			n.restart()
		}
	}
}

func TestArtifactInUserNamespaces(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	img := n.pull(serve(t, "m", "1", model(t, "weights")).Addr() + "/m:1")
	for _, first := range []uint32{0, 100000} {
		v := n.volume(fmt.Sprint("v", first), img.ID)
		if first > 0 {
			v.UserNS = userNS(t, first)
		}
		n.mount(v)
		for _, name := range []string{".", "weights", "weights/part-1"} {
			checkOwner(t, filepath.Join(v.Target, name), first, first)
		}
		n.removeRootfs(v)
	}
}

// An artifact that lost a file or its record is removed after the next start, and pulled
// again; a server that only looks leaves it, and so does one with containers that use it.
func TestDamagedArtifact(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	name := serve(t, "m", "1", model(t, "weights")).Addr() + "/m:1"
	for what, damage := range map[string]func(dir string) error{
		"file lost":      func(dir string) error { return os.Remove(filepath.Join(dir, "files/copy")) },
		"file cut off":   func(dir string) error { return os.Truncate(filepath.Join(dir, "files/copy"), 1) },
		"record cut off": func(dir string) error { return os.Truncate(filepath.Join(dir, "record.json"), 20) },
		"manifest lost":  func(dir string) error { return os.Remove(filepath.Join(dir, "manifest.json")) },
		"other manifest": func(dir string) error { return os.WriteFile(filepath.Join(dir, "manifest.json"), []byte("{}"), 0o600) },
	} {
		img := n.pull(name)
		used := n.volume("used", img.ID)
		n.mount(used)
		dir := filepath.Join(n.cfg.Root, "crius-artifacts/artifacts", img.ID)
		ok(t, damage(dir))
		ok(t, n.Close(testContext(t)))
		n.cfg.ReadOnly = true
		n.open()
		if _, err := os.Stat(dir); err != nil || len(n.list()) > 0 {
			t.Errorf("%s: looked at: %v, listed %+v", what, err, n.list())
		}
		ok(t, n.Close(testContext(t)))
		n.cfg.ReadOnly = false
		n.open()
		ok(t, n.Adopt(testContext(t), []Rootfs{used}))
		if got := n.read(used, "weights/part-1"); got != "weights" || len(n.list()) > 0 {
			t.Errorf("%s: who uses it reads %q, listed %+v", what, got, n.list())
		}
		if defects, err := n.Verify(testContext(t), []Rootfs{used}); err != nil || len(defects) != 1 || !strings.Contains(defects[0].Text, "damaged") {
			t.Errorf("%s: verified %+v, %v", what, defects, err)
		}
		n.removeRootfs(used)
		n.restart()
		ok(t, n.Adopt(testContext(t), nil))
		n.noArtifacts()
		again := n.pull(name)
		v := n.volume("v", again.ID)
		n.mount(v)
		if got := n.read(v, "copy"); got != "shared" {
			t.Errorf("%s: pulled again it has %q", what, got)
		}
		n.removeRootfs(v)
		n.remove(again.ID)
	}
	img := n.pull(name)
	n.remove(img.ID)
	mkdir(t, filepath.Join(n.cfg.Root, "crius-artifacts/artifacts", img.ID)) // whatever left it
	n.remove(n.pull(name).ID)
	n.noArtifacts()
}

// Commands that only look know artifacts in use, and a wipe takes all that is left.
func TestArtifactsOfAStoreThatIsLookedAt(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	img := n.pull(serve(t, "m", "1", model(t, "weights")).Addr() + "/m:1")
	v := n.volume("v", img.ID)
	n.mount(v)
	looking := *n
	looking.cfg.ReadOnly = true
	looking.open()
	if defects, err := looking.Verify(testContext(t), []Rootfs{v}); err != nil || len(defects) > 0 {
		t.Errorf("verified: %+v, %v", defects, err)
	}
	ok(t, looking.Close(testContext(t)))
	if err := os.RemoveAll(filepath.Join(n.cfg.Root, "crius-artifacts/artifacts", img.ID)); err != nil {
		t.Fatal(err)
	}
	if defects, err := n.Verify(testContext(t), []Rootfs{v}); err != nil || len(defects) != 1 || !strings.Contains(defects[0].Text, "damaged") {
		t.Errorf("without its files: %+v, %v", defects, err)
	}
	n.removeRootfs(v)
	n.remove(img.ID)
	ok(t, n.Forget())
	if left := n.entries("root/crius-artifacts"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// twins are an image and an artifact with one id: the config of one is the manifest of the
// other.
func twins(t *testing.T) (img, a *image.Artifact) {
	t.Helper()
	img, a = motd(t, "image"), model(t, "weights")
	var manifest map[string]any
	ok(t, json.Unmarshal(a.Manifest, &manifest))
	a.Manifest = changedJSON(t, img.Blobs[img.Config], func(config map[string]any) {
		delete(config, "history") // no manifest has one
		maps.Copy(config, manifest)
	})
	old := img.Config
	delete(img.Blobs, old)
	img.Config = a.Digest()
	img.Blobs[img.Config] = a.Manifest
	img.Manifest = changedJSON(t, img.Manifest, func(m map[string]any) {
		m["config"].(map[string]any)["digest"], m["config"].(map[string]any)["size"] = img.Config, len(a.Manifest)
	})
	return img, a
}

// Nobody can have an artifact run in the place of an image, or an image's signatures count
// for an artifact.
func TestImageAndArtifactOfOneID(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	img, a := twins(t)
	r := serve(t, "m", "image", img)
	r.Push("m", "artifact", a)
	names := []string{r.Addr() + "/m:image", r.Addr() + "/m:artifact"}
	for range names {
		first := n.pull(names[0])
		if first.ID != img.ID() {
			t.Fatalf("%s has the id %s", names[0], first.ID)
		}
		if _, err := n.Pull(testContext(t), PullRequest{Image: names[1]}); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s pulled beside %s: %v", names[1], names[0], err)
		}
		if list := n.list(); len(list) != 1 || len(list[0].Files) != len(first.Files) {
			t.Errorf("listed %+v", list)
		}
		n.remove(first.ID)
		slices.Reverse(names)
	}
	var pulls sync.WaitGroup // both at a time: one of them is refused, whichever comes first
	pulled := make([]error, len(names))
	for i, name := range names {
		pulls.Go(func() { _, pulled[i] = n.Pull(testContext(t), PullRequest{Image: name}) })
	}
	pulls.Wait()
	if list := n.list(); len(list) > 1 || pulled[0] == nil && pulled[1] == nil {
		t.Errorf("pulled at a time: %v, listed %+v", pulled, list)
	}
	n.remove(img.ID())
	n.noArtifacts()
}

func TestArtifactIsNoRootOfContainers(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := n.rootfs("c", n.pull(serve(t, "m", "1", model(t, "weights")).Addr()+"/m:1").ID)
	if err := n.MountRootfs(testContext(t), r); !errors.Is(err, fault.NotFound) {
		t.Errorf("mounted: %v", err)
	}
	n.removeRootfs(r)
}

// A pull of an artifact of one kind fetches nothing of another kind, and its content is that of the
// registry.
func TestKindOfArtifact(t *testing.T) {
	t.Parallel()
	kind := source.Kind{Config: "application/vnd.example.config", MaxSize: 6}
	n := newNode(t)
	build := func(config string, f image.Files) *image.Artifact {
		a, err := f.BuildWith(config)
		ok(t, err)
		return a
	}
	r := serve(t, "p", "fits", build(kind.Config, image.Files{"a": "first", "b": "2"}))
	for tag, a := range map[string]*image.Artifact{
		"long": build(kind.Config, image.Files{"a": "first", "b": "22"}), "type": build("application/other", image.Files{"a": "a"}), "image": motd(t, "an image"),
	} {
		r.Push("p", tag, a)
		r.Forget()
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/p:" + tag, Kind: &kind})
		if !errors.Is(err, fault.Invalid) || len(n.list()) > 0 {
			t.Errorf("%s: %v, images %v", tag, err, n.list())
		}
		if tag != "image" && len(blobRequests(r)) > 0 {
			t.Errorf("%s: fetched %q", tag, blobRequests(r))
		}
	}
	pulled, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/p:fits", Kind: &kind})
	ok(t, err)
	if content, err := pulled.Content(testContext(t), kind); string(content) != "first" || err != nil {
		t.Errorf("content %q, %v", content, err)
	}
	if _, err := pulled.Content(testContext(t), source.Kind{Config: kind.Config, MaxSize: 5}); !errors.Is(err, fault.Invalid) {
		t.Errorf("an artifact that was pulled before and is too large: %v", err)
	}
	if _, err := n.pull(r.Addr()+"/p:image").Content(testContext(t), kind); !errors.Is(err, fault.Invalid) {
		t.Errorf("an image: %v", err)
	}
	file := filepath.Join(n.cfg.Root, "crius-artifacts/artifacts", pulled.ID, "files/a")
	ok(t, os.WriteFile(file, []byte("other"), 0o600))
	if _, err := pulled.Content(testContext(t), kind); err == nil || !strings.Contains(err.Error(), "digest") {
		t.Errorf("content that has changed: %v", err)
	}
	n.remove(pulled.ID)
	if _, err := pulled.Content(testContext(t), kind); !errors.Is(err, fault.NotFound) {
		t.Errorf("an artifact that was removed: %v", err)
	}
}

// Artifacts in additional stores are listed, mounted, and found by pulls under their names. They
// are never changed: a later pull takes the names.
func TestAdditionalArtifactStores(t *testing.T) {
	t.Parallel()
	shared := newNode(t)
	weights := strings.Repeat("one", 1<<20)
	r := serve(t, "m", "1", model(t, weights))
	name := r.Addr() + "/m:1"
	one := shared.pull(name)
	n := newNode(t, func(c *Options) { c.AdditionalArtifactStores = []string{t.TempDir(), shared.cfg.Root} })
	empty := n.used()
	check := func() {
		t.Helper()
		got, err := n.Image(testContext(t), name)
		ok(t, err)
		if got.ID != one.ID || !got.ReadOnly || !got.Pinned || len(n.list()) != 1 || n.used() >= empty+1<<20 { // records grow
			t.Errorf("listed %+v, used %d, before %d", n.list(), n.used(), empty)
		}
		if err := n.Remove(testContext(t), name); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), shared.cfg.Root) {
			t.Errorf("removed: %v", err)
		}
	}
	check()
	v := n.volume("v", one.ID)
	n.mount(v)
	if got := n.read(v, "weights/part-1"); got != weights {
		t.Errorf("mounted %d bytes", len(got))
	}
	n.restart()
	ok(t, n.Adopt(testContext(t), []Rootfs{v}))
	if defects, err := n.Verify(testContext(t), []Rootfs{v}); err != nil || len(defects) > 0 {
		t.Errorf("verified: %+v, %v", defects, err)
	}
	n.removeRootfs(v)
	r.Forget()
	for _, ref := range []string{name, r.Addr() + "/m@sha256:" + one.ID} {
		if got := n.pull(ref); got.ID != one.ID || len(blobRequests(r)) > 0 {
			t.Errorf("pulled %s as %+v, fetched %q", ref, got, blobRequests(r))
		}
	}
	check()
	n.noArtifacts()

	r.Push("m", "1", model(t, "two"))
	two := n.pull(name)
	got, err := n.Image(testContext(t), one.ID)
	ok(t, err)
	if two.ReadOnly || len(got.RepoTags) > 0 {
		t.Errorf("the name means %+v, and in the additional store %+v", two, got)
	}
	n.remove(two.ID)
	check()
	r.Push("m", "1", motd(t, "an image"))
	image := n.pull(name)
	if got, err := n.Image(testContext(t), name); err != nil || got.ID != image.ID {
		t.Errorf("the name means %+v, %v", got, err)
	}
	n.remove(image.ID)
	r.Push("other", "1", model(t, weights))
	if own := n.pull(r.Addr() + "/other:1"); own.ID != one.ID || own.ReadOnly {
		t.Errorf("under a name that the additional store does not have: %+v", own)
	}
	n.remove(one.ID)
	check()
}

// Artifacts that are added to an additional store are found, and deleted ones are forgotten.
func TestAdditionalArtifactStoreChanges(t *testing.T) {
	t.Parallel()
	shared := newNode(t)
	n := newNode(t, func(c *Options) { c.AdditionalArtifactStores = []string{shared.cfg.Root} })
	r := serve(t, "m", "1", model(t, "one"))
	one := shared.pull(r.Addr() + "/m:1")
	r.Forget()
	if got := n.pull(r.Addr() + "/m:1"); got.ID != one.ID || len(blobRequests(r)) > 0 {
		t.Errorf("pulled %+v, fetched %q", got, blobRequests(r))
	}
	shared.remove(one.ID)
	if got := n.pull(r.Addr() + "/m:1"); got.ID != one.ID || got.ReadOnly {
		t.Errorf("pulled what has gone: %+v", got)
	}
}

// Nobody waits for a store on a network that hangs, nor for one that is not there.
func TestAdditionalArtifactStoreThatIsNotThere(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(c *Options) { c.AdditionalArtifactStores = []string{filepath.Join(t.TempDir(), "absent")} })
	if img := n.pull(serve(t, "m", "1", model(t, "one")).Addr() + "/m:1"); img.ReadOnly {
		t.Errorf("pulled %+v", img)
	}
	cfg := n.cfg
	cfg.AdditionalArtifactStores = []string{cfg.Root}
	if _, err := openStore(testContext(t), cfg); !errors.Is(err, fault.Precondition) {
		t.Errorf("a store that is additional to itself: %v", err)
	}
}
