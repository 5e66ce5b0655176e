package storage

import (
	"archive/tar"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// manifestOf changes a built image's manifest, as JSON.
func manifestOf(t *testing.T, change func(m map[string]any)) *image.Artifact {
	t.Helper()
	a := *motd(t, "hostile")
	a.Manifest = changedJSON(t, a.Manifest, change)
	return &a
}

// changedJSON changes a document.
func changedJSON(t testing.TB, document []byte, change func(m map[string]any)) []byte {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal(document, &m); err != nil {
		t.Fatal(err)
	}
	change(m)
	changed, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return changed
}

// Manifests and configs that are nonsense, ambiguous or too large are refused,
// quickly, and leave nothing.
func TestHostileManifests_CVE_2020_1702_CVE_2021_41190_CVE_2023_25153_CVE_2024_3727(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	config := func(m map[string]any) map[string]any { return m["config"].(map[string]any) }
	first := func(m map[string]any) map[string]any { return m["layers"].([]any)[0].(map[string]any) }
	raw := func(mediaType, content string) *image.Artifact {
		return &image.Artifact{MediaType: mediaType, Manifest: []byte(content)}
	}
	var crowd []*image.Artifact
	for range source.MaxInstances + 1 {
		crowd = append(crowd, &image.Artifact{MediaType: imagespec.MediaTypeImageManifest, Manifest: []byte("{}")})
	}
	r := serve(t, "app", "", motd(t, "x"))
	for what, a := range map[string]*image.Artifact{
		// CVE-2024-3727
		"layer digest climbs": manifestOf(t, func(m map[string]any) { first(m)["digest"] = "sha256:../../../etc/passwd" }),
		"layer digest empty":  manifestOf(t, func(m map[string]any) { first(m)["digest"] = "" }),
		"layer digest in capitals": manifestOf(t, func(m map[string]any) {
			first(m)["digest"] = strings.ToUpper(first(m)["digest"].(string))
		}),
		"layer digest unknown": manifestOf(t, func(m map[string]any) { first(m)["digest"] = "rot13:" + strings.Repeat("a", 64) }),
		"config digest climbs": manifestOf(t, func(m map[string]any) { config(m)["digest"] = "sha256:../../x" }),
		"config digest empty":  manifestOf(t, func(m map[string]any) { config(m)["digest"] = "" }),
		"negative size":        manifestOf(t, func(m map[string]any) { first(m)["size"] = -5 }),
		"layers are a number":  manifestOf(t, func(m map[string]any) { m["layers"] = 7 }),
		// Truncated, they would take the id of the image that has all layers.
		"number of layers: one more": manifestOf(t, func(m map[string]any) { m["layers"] = append(m["layers"].([]any), first(m)) }),
		"number of layers: one less": manifestOf(t, func(m map[string]any) { m["layers"] = m["layers"].([]any)[:1] }),
		"number of layers: none":     manifestOf(t, func(m map[string]any) { m["layers"] = []any{} }),
		"too many layers": manifestOf(t, func(m map[string]any) {
			many := make([]any, source.MaxLayers+1)
			for i := range many {
				many[i] = first(m)
			}
			m["layers"] = many
		}),
		// CVE-2021-41190
		"manifest and index at once": manifestOf(t, func(m map[string]any) { m["manifests"] = []any{} }),
		"schema 1 and 2 at once":     manifestOf(t, func(m map[string]any) { m["fsLayers"], m["history"] = []any{}, []any{} }),
		"media type lies":            manifestOf(t, func(m map[string]any) { m["mediaType"] = imagespec.MediaTypeImageIndex }),
		"crowded index":              index(t, crowd...),
		"no JSON":                    raw(imagespec.MediaTypeImageManifest, "nonsense"),
		"empty":                      raw(imagespec.MediaTypeImageManifest, ""),
		"null":                       raw(imagespec.MediaTypeImageManifest, "null"),
		"deep JSON":                  raw(imagespec.MediaTypeImageManifest, strings.Repeat("[", 1<<20)),
		"a list":                     raw(imagespec.MediaTypeImageIndex, "[]"),
		"empty index":                raw(imagespec.MediaTypeImageIndex, `{"schemaVersion":2,"manifests":[]}`),
		// CVE-2020-1702
		"huge manifest": raw(imagespec.MediaTypeImageManifest, `{"schemaVersion":2,"x":"`+strings.Repeat("a", 5<<20)+`"}`),
		"huge index":    raw(imagespec.MediaTypeImageIndex, `{"schemaVersion":2,"x":"`+strings.Repeat("a", 5<<20)+`"}`),
		"not an image":  raw("application/pdf", "%PDF"),
	} {
		r.Push("app", "bad", a)
		img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:bad"})
		if err == nil {
			t.Errorf("%s: taken as %s", what, img.ID)
			n.remove(img.ID)
			continue
		}
		if errors.Is(err, fault.Unavailable) || errors.Is(err, fault.NotFound) && what != "empty index" {
			t.Errorf("%s: looks like something that a retry may mend: %v", what, err)
		}
		for _, ours := range []string{"layer digest", "config digest", "negative", "too many", "crowded", "index in", "number of layers"} {
			if strings.HasPrefix(what, ours) && !errors.Is(err, fault.Invalid) {
				t.Errorf("%s: not refused by our own check: %v", what, err)
			}
		}
		if len(err.Error()) > 3*maxErrorText || !utf8.ValidString(err.Error()) {
			t.Errorf("%s: error of %d bytes", what, len(err.Error()))
		}
	}
	n.empty()
}

func TestHostileConfigs(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	withConfig := func(raw []byte) *image.Artifact {
		a := manifestOf(t, func(m map[string]any) {
			config := m["config"].(map[string]any)
			config["digest"], config["size"] = digest.FromBytes(raw).String(), len(raw)
			m["layers"] = []any{}
		})
		a.Blobs = map[digest.Digest][]byte{digest.FromBytes(raw): raw}
		a.Config = digest.FromBytes(raw)
		return a
	}
	r := serve(t, "app", "", motd(t, "x"))
	for what, content := range map[string]string{
		"no JSON": "nonsense",
		"a list":  "[]",
		"huge":    `{"os":"linux","x":"` + strings.Repeat("a", 5<<20) + `"}`,
		"deep":    `{"x":` + strings.Repeat("[", 100000),
	} {
		r.Push("app", "bad", withConfig([]byte(content)))
		if img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:bad"}); err == nil {
			t.Errorf("%s: taken as %+v", what, img)
		}
	}
	n.empty()

	// What reaches protobuf is valid UTF-8, whatever the config holds.
	odd := "{\"architecture\":\"amd64\",\"os\":\"linux\",\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[]},\"config\":" +
		"{\"User\":\"\xff\xfe\",\"Env\":[\"A=\xc3\x28\"],\"Labels\":{\"\xff\":\"\xff\"},\"WorkingDir\":\"\x7f\xff\"}}"
	r.Push("app", "odd", withConfig([]byte(odd)))
	img := n.pull(r.Addr() + "/app:odd")
	uid, user := img.User()
	spec, err := n.Spec(testContext(t), img)
	if err != nil {
		t.Fatal(err)
	}
	texts := []string{user, img.Config.Env[0], img.Config.WorkingDir}
	for key, value := range spec.Config.Labels {
		texts = append(texts, key, value)
	}
	for _, text := range texts {
		if !utf8.ValidString(text) {
			t.Errorf("%q is no UTF-8", text)
		}
	}
	if uid != nil {
		t.Errorf("user %q has the id %d", user, *uid)
	}
	n.remove(img.ID)
	n.empty()
}

// header makes a tar header that the friendly constructors do not.
func header(name string, change func(h *tar.Header)) image.File {
	f := image.Text(name, "")
	change(&f.Header)
	return f
}

// Layers that try to write outside of themselves, or to be more than they are:
// they are refused or tamed, and nothing outside changes.
func TestHostileLayers_CVE_2021_20291_CVE_2021_32760_CVE_2025_47290_CVE_2025_58183_CVE_2026_95838(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	outside := filepath.Join(n.dir, "outside")
	if err := os.WriteFile(outside, []byte("untouched"), 0o600); err != nil {
		t.Fatal(err)
	}
	up := strings.Repeat("../", 20) + strings.TrimPrefix(n.dir, "/")
	sparse := layer(t, image.Text("a", "b"))
	r := serve(t, "app", "", motd(t, "x"))
	for what, layers := range map[string][]image.Layer{
		"climbing name":         {layer(t, image.Text(up+"/outside", "hit"))},
		"absolute name":         {layer(t, image.Text(outside, "inside the layer, at best"))},
		"link and through it":   {layer(t, image.Symlink("out", n.dir), image.Text("out/outside", "hit"))},
		"link, then a layer":    {layer(t, image.Symlink("out", n.dir)), layer(t, image.Text("out/outside", "hit"))},
		"hard link outside":     {layer(t, image.Hardlink("stolen", outside), image.Text("stolen", "hit"))},
		"hard link that climbs": {layer(t, image.Hardlink("stolen", up+"/outside"), image.Text("stolen", "hit"))},
		"link over a directory": {layer(t, image.Dir("d"), image.Text("d/f", "x"), image.Symlink("d", n.dir), image.Text("d/outside", "hit"))},
		"whiteout that climbs":  {layer(t, image.Text(up+"/.wh.outside", ""))},
		"whiteout of ..":        {layer(t, image.Text(".wh...", ""))},
		"whiteout of .":         {layer(t, image.Text(".wh..", ""))},
		"empty whiteout":        {layer(t, image.Text(".wh.", ""))},
		"root is a link":        {layer(t, image.Symlink(".", n.dir), image.Text("outside", "hit"))},
		"chmod through a link":  {layer(t, image.Symlink("out", outside), header("out", func(h *tar.Header) { h.Mode = 0o777 }))},
		"block device":          {layer(t, header("sda", func(h *tar.Header) { h.Typeflag, h.Devmajor = tar.TypeBlock, 8 }))},
		"unknown type":          {layer(t, header("odd", func(h *tar.Header) { h.Typeflag = 'Z' }))},
		"huge owner":            {layer(t, header("own", func(h *tar.Header) { h.Uid, h.Gid = 1<<31-1, 1<<31-1 }))},
		"odd xattrs": {layer(t, header("x", func(h *tar.Header) {
			h.PAXRecords = map[string]string{"SCHILY.xattr.trusted.overlay.redirect": "/etc", "SCHILY.xattr.trusted.overlay.opaque": "y"}
		}))},
		"many opaque marks":      {layer(t, many(20000, image.Opaque("d"))...)}, // CVE-2026-95838
		"no tar":                 {image.RawLayer(random(10000))},
		"half a tar":             {image.RawLayer(make([]byte, 700))},
		"empty":                  {image.RawLayer(nil)},
		"sparse GNU tar":         {image.RawLayer(gnuSparse())}, // CVE-2025-58183
		"no gzip":                {{Blob: []byte("\x1f\x8bnonsense"), Digest: digest.FromString("\x1f\x8bnonsense"), DiffID: sparse.DiffID}},
		"lies about its content": {{Blob: sparse.Blob, Digest: sparse.Digest, DiffID: someDigest}},
	} {
		r.Push("app", "bad", build(t, image.Image{Layers: layers}))
		img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:bad"})
		if content, readErr := os.ReadFile(outside); readErr != nil || string(content) != "untouched" {
			t.Fatalf("%s: the file outside holds %q, %v", what, content, readErr)
		}
		if st, statErr := os.Stat(outside); statErr != nil || st.Mode().Perm() != 0o600 {
			t.Fatalf("%s: the file outside has mode %v, %v", what, st.Mode(), statErr)
		}
		if err != nil {
			continue
		}
		c := n.rootfs(what, img.ID)
		if err := n.MountRootfs(testContext(t), c); err == nil {
			n.stays(c, what)
		}
		n.removeRootfs(c)
		n.remove(img.ID)
	}
	n.empty()
}

// stays fails the test if a root file system shows the host.
func (n *node) stays(c Rootfs, what string) {
	n.t.Helper()
	for _, name := range []string{"stolen", "outside"} {
		if content, err := os.ReadFile(filepath.Join(c.Target, name)); err == nil && string(content) == "untouched" {
			n.t.Errorf("%s: the image holds the host's file", what)
		}
	}
}

func many(count int, f image.File) []image.File {
	files := []image.File{image.Dir("d")}
	for i := range count {
		files = append(files, f, image.Text(fmt.Sprintf("d/%d", i%50), "x"))
	}
	return files
}

// gnuSparse is an old GNU sparse file header with a map that claims far more
// than follows.
func gnuSparse() []byte {
	block := make([]byte, 512)
	copy(block, "sparse")
	copy(block[100:], "0000644\x00")
	copy(block[108:], "0000000\x00")
	copy(block[116:], "0000000\x00")
	copy(block[124:], "00000000000\x00")
	copy(block[136:], "00000000000\x00")
	block[156] = 'S'
	copy(block[257:], "ustar  \x00")
	for i := range 4 {
		copy(block[386+24*i:], "00000000000\x0077777777777\x00")
	}
	block[482] = 1 // and more maps, for ever
	copy(block[483:], "77777777777\x00")
	copy(block[148:], "        ")
	sum := 0
	for _, b := range block {
		sum += int(b)
	}
	copy(block[148:], fmt.Sprintf("%06o\x00 ", sum))
	more := make([]byte, 512)
	for i := range 21 {
		copy(more[24*i:], "00000000000\x0000000000001\x00")
	}
	more[504] = 1
	return append(block, bytes.Repeat(more, 2000)...)
}

// Another tool may have put documents into the store that are larger than the
// library takes from a registry.
func TestHugeStoredManifestIsNotRead(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	raw, err := n.store.ImageBigData(img.ID, cstorage.ImageDigestBigDataKey)
	if err != nil {
		t.Fatal(err)
	}
	padded := append(raw, bytes.Repeat([]byte(" "), maxDocument)...)
	if err := n.store.SetImageBigData(img.ID, cstorage.ImageDigestBigDataKey, padded, manifest.Digest); err != nil {
		t.Fatal(err)
	}
	if images := n.list(); len(images) != 0 {
		t.Errorf("%+v", images)
	}
	n.pull(img.RepoTags[0]) // brings the right one
	if images := n.list(); len(images) != 1 {
		t.Errorf("%+v", images)
	}
}

// What a registry writes into its errors is shown, but bounded and harmless.
func TestHostileErrorText(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "x"))
	r.Require(registry.Auth{Username: "joe", Password: "correct horse"})
	body := fmt.Sprintf(`{"errors":[{"code":"DENIED","message":"\u001b[2J\u0000 Basic %s %s %s"}]}`,
		encode("joe:battery staple"), "battery staple", strings.Repeat("x", 1<<20))
	r.Inject(registry.Fault{Path: "/manifests/", Do: registry.Replace(func([]byte) []byte { return []byte(body) })})
	_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1", Auth: passwordOf("joe", "battery staple")})
	if err == nil {
		t.Fatal("pulled")
	}
	for _, bad := range []string{"battery staple", encode("joe:battery staple"), "\x1b", "\x00"} {
		if strings.Contains(err.Error(), bad) {
			t.Errorf("%q is in the error", bad)
		}
	}
	if len(err.Error()) > 3*maxErrorText {
		t.Errorf("error of %d bytes", len(err.Error()))
	}
}

const (
	maxImageNames     = pull.MaxNames
	maxImageManifests = pull.MaxManifests
	maxPastNames      = pull.MaxPastNames
)

// A registry can serve one config under ever new names and manifests. What is stored and
// listed of an image stays small.
func TestOneImageUnderManyNamesAndManifests(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := registrytest.Start(t)
	a := func(i int) *image.Artifact {
		return manifestOf(t, func(m map[string]any) { m["annotations"] = map[string]string{"number": fmt.Sprint(i)} })
	}
	name := func(i int) string { return fmt.Sprintf("%s/app%d:1", r.Addr(), i) }
	pull := func(i int) error {
		r.Push(fmt.Sprintf("app%d", i), "1", a(i))
		_, err := n.Pull(testContext(t), PullRequest{Image: name(i)})
		return err
	}
	if err := pull(0); err != nil {
		t.Fatal(err)
	}
	images := n.list()
	if len(images) != 1 {
		t.Fatalf("%d images", len(images))
	}
	for i := 1; i < maxImageManifests-1; i++ { // as if they had been pulled, which would take minutes
		manifest := a(i).Manifest
		key := cstorage.ImageDigestManifestBigDataNamePrefix + "-" + digest.FromBytes(manifest).String()
		ok(t, n.store.SetImageBigData(images[0].ID, key, manifest, func(m []byte) (digest.Digest, error) { return digest.FromBytes(m), nil }))
		ok(t, n.store.AddNames(images[0].ID, []string{name(i)}))
	}
	if err := pull(maxImageManifests - 1); err != nil {
		t.Fatal(err)
	}
	images = n.list()
	if len(images) != 1 {
		t.Fatalf("%d images", len(images))
	}
	one := images[0]
	if len(one.RepoTags) != maxImageNames || !slices.Contains(one.RepoTags, name(maxImageManifests-1)) || slices.Contains(one.RepoTags, name(0)) {
		t.Errorf("names: %q", one.RepoTags)
	}
	if len(one.RepoDigests) > maxRepoDigests+maxImageManifests {
		t.Errorf("%d combinations of names and digests", len(one.RepoDigests))
	}
	err := pull(maxImageManifests)
	if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "and the image, and pull it again") {
		t.Errorf("one more: %v", err)
	}
	if err := pull(maxImageManifests - 5); err != nil { // which is there
		t.Errorf("an old one: %v", err)
	}
	n.remove(one.ID)
	if err := pull(maxImageManifests); err != nil {
		t.Errorf("after its removal: %v", err)
	}

	n.addPastNames(one.ID, maxPastNames)
	if err := pull(maxImageManifests + 1); !errors.Is(err, fault.Precondition) {
		t.Errorf("another name: %v", err)
	}
	if err := pull(maxImageManifests); err != nil {
		t.Errorf("a name that it has: %v", err)
	}
}

// addPastNames makes an image look as if it had had number more names. Adding them by the library
// would take very long, since it compares each name with all others.
func (n *node) addPastNames(id string, number int) {
	n.t.Helper()
	ok(n.t, n.Close(n.t.Context()))
	driverSetUp.Lock() // as for what opens a store
	n.store.Free()     // or the next one would be this one, with the records as they are now
	driverSetUp.Unlock()
	path := filepath.Join(n.cfg.Root, imagesRecords)
	text, err := os.ReadFile(path)
	ok(n.t, err)
	var images []map[string]any
	ok(n.t, json.Unmarshal(text, &images))
	for _, img := range images {
		if img["id"] != id {
			continue
		}
		past, _ := img["names-history"].([]any)
		for i := range number {
			past = append(past, fmt.Sprintf("registry.test/past:%d", i))
		}
		img["names-history"] = past
	}
	text, err = json.Marshal(images)
	ok(n.t, err)
	ok(n.t, os.WriteFile(path, text, 0o600))
	n.open()
}

// The store has an image's id for other layers. They are not taken for the image's, and the error
// says how to remove them.
func TestImageIDOfOtherLayers(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "x")
	r := serve(t, "app", "1", a)
	other := n.pull(serve(t, "other", "1", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("a", "b"))}})).Addr() + "/other:1")
	record, err := n.store.Image(other.ID)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.store.CreateImage(a.Config.Encoded(), []string{r.Addr() + "/truncated:1"}, record.TopLayer, "", &cstorage.ImageOptions{
		BigData: []cstorage.ImageBigDataOption{{Key: a.Config.String(), Data: a.Blobs[a.Config], Digest: a.Config}},
	}); err != nil {
		t.Fatal(err)
	}
	_, err = n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
	if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "crictl rmi "+a.Config.Encoded()) {
		t.Errorf("pulled: %v", err)
	}
	if _, err := n.store.DeleteImage(a.Config.Encoded(), true); err != nil {
		t.Fatal(err)
	}
	n.pull(r.Addr() + "/app:1")
}

// signedSchema1 makes a manifest of Docker's oldest format, in which the signatures say which part
// of the text they, and the digest of the manifest, are about. injected are fields after that part.
func signedSchema1(layer image.Layer, injected string) (*image.Artifact, digest.Digest) {
	head := fmt.Sprintf(`{"schemaVersion":1,"name":"app","tag":"1","architecture":%q,"fsLayers":[{"blobSum":%q}],`+
		`"history":[{"v1Compatibility":"{\"id\":\"%064d\",\"architecture\":\"%s\",\"os\":\"linux\"}"}]`, runtime.GOARCH, layer.Digest, 1, runtime.GOARCH)
	about := base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"formatLength":%d,"formatTail":%q}`, len(head), base64.RawURLEncoding.EncodeToString([]byte("}"))))
	a := &image.Artifact{
		MediaType: manifest.DockerV2Schema1SignedMediaType,
		Manifest:  fmt.Appendf(nil, `%s%s,"signatures":[{"header":{"alg":"ES256"},"signature":"","protected":%q}]}`, head, injected, about),
		Blobs:     map[digest.Digest][]byte{layer.Digest: layer.Blob},
	}
	return a, digest.FromString(head + "}")
}

// The digest of a signed manifest of schema 1 is that of a part of its text. What stands
// behind that part must not count: a registry could make a digest mean any image.
func TestDigestPinsSchema1_CVE_2014_8179(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	good, bad := layer(t, image.Text("program", "good")), layer(t, image.Text("program", "bad"))
	r := serve(t, "other", "1", build(t, image.Image{Layers: []image.Layer{bad}}))
	pull := func(injected string) (*Image, error) {
		a, pinned := signedSchema1(good, injected)
		a.Blobs[bad.Digest] = bad.Blob
		r.Push("app", pinned.String(), a)
		return n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app@" + pinned.String()})
	}
	img, err := pull("")
	if err != nil {
		t.Fatalf("as it was signed: %v", err)
	}
	n.remove(img.ID)
	if img, err = pull(fmt.Sprintf(`,"fsLayers":[{"blobSum":%q}]`, bad.Digest)); err == nil {
		t.Errorf("another layer is taken, as image %s", img.ID)
	}
	for _, length := range []string{"-1", "-1e30", "1e30", `"x"`} {
		about := fmt.Sprintf(`{"formatLength":%s,"formatTail":"fQ"}`, length)
		a := &image.Artifact{MediaType: manifest.DockerV2Schema1SignedMediaType, Manifest: fmt.Appendf(nil,
			`{"schemaVersion":1,"signatures":[{"header":{},"protected":%q}]}`, base64.RawURLEncoding.EncodeToString([]byte(about)))}
		pinned := digest.FromString(length)
		for _, ref := range []string{":bad", "@" + pinned.String()} {
			r.Push("app", ref[1:], a)
			if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app" + ref}); err == nil || errors.Is(err, fault.Unavailable) {
				t.Errorf("signatures about %s bytes, pulled by %s: %v", length, ref[:1], err)
			}
		}
	}
	n.empty()
}
