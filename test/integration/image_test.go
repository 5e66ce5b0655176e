package integration

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/image"
	"github.com/crius-run/crius/internal/testkit/node"
	"github.com/crius-run/crius/internal/testkit/registry"
	"github.com/crius-run/crius/test/images"
)

// store is a node whose images are the test's own business.
func store(t *testing.T) *world { return private(t, node.Options{}) }

// unusual is an image like no other; note goes into its configuration.
func unusual(t *testing.T, note string, change ...func(*imagespec.ImageConfig)) *image.Artifact {
	t.Helper()
	built, err := images.Build(func(c *imagespec.ImageConfig) {
		c.Labels = map[string]string{"note": t.Name() + note}
		for _, f := range change {
			f(c)
		}
	}, image.Text("note", t.Name()+note))
	if err != nil {
		t.Fatal(err)
	}
	return built
}

func (w *world) imageStatus(t *testing.T, ref string) *cri.Image {
	t.Helper()
	resp, err := w.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref}})
	if err != nil {
		t.Fatalf("ImageStatus %s: %v", ref, err)
	}
	return resp.Image
}

func (w *world) removeImage(t *testing.T, ref string) {
	t.Helper()
	if _, err := w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}}); err != nil {
		t.Fatalf("RemoveImage %s: %v", ref, err)
	}
}

func (w *world) listImages(t *testing.T, filter *cri.ImageFilter) []*cri.Image {
	t.Helper()
	resp, err := w.Images().ListImages(t.Context(), &cri.ListImagesRequest{Filter: filter})
	if err != nil {
		t.Fatalf("ListImages: %v", err)
	}
	return resp.Images
}

func TestImagesByEveryName(t *testing.T) {
	t.Parallel()
	w := store(t)
	built := unusual(t, "", func(c *imagespec.ImageConfig) { c.User = "1001:2001" })
	w.Registry.Push("team/app", "v1", built)
	w.Registry.Push("team/app", "v2", built)
	const repo = node.RegistryHost + "/team/app"
	digested := repo + "@" + built.Digest().String()

	id := w.pull(t, repo+":v1")
	equal(t, "image_ref", id, built.ID())
	equal(t, "image_ref of a second tag", w.pull(t, repo+":v2"), id)
	equal(t, "image_ref by digest", w.pull(t, digested), id)
	equal(t, "image_ref by tag and digest", w.pull(t, repo+":v1@"+built.Digest().String()), id)

	for _, name := range []string{repo + ":v1", repo + ":v2", digested, id, id[:12], "team/app:v1"} {
		img := w.imageStatus(t, name)
		if img == nil {
			t.Errorf("%s: not found", name)
			continue
		}
		equal(t, name+": id", img.Id, id)
		equalSet(t, name+": tags", img.RepoTags, []string{repo + ":v1", repo + ":v2"})
		equalSet(t, name+": digests", img.RepoDigests, []string{digested})
		equal(t, name+": uid", img.GetUid().GetValue(), 1001)
		equal(t, name+": user name", img.Username, "")
		if img.Size == 0 {
			t.Errorf("%s: size is 0", name)
		}
	}
	for _, name := range []string{repo + ":v3", "team/other", strings.Repeat("0", 64), repo + "@sha256:" + strings.Repeat("0", 64)} {
		if img := w.imageStatus(t, name); img != nil {
			t.Errorf("%s: found %v", name, img)
		}
	}
	if images := w.listImages(t, &cri.ImageFilter{Image: &cri.ImageSpec{Image: repo + ":v1"}}); len(images) != 1 || images[0].Id != id {
		t.Errorf("list by name: %v", images)
	}
	if images := w.listImages(t, &cri.ImageFilter{Image: &cri.ImageSpec{Image: repo + ":v3"}}); len(images) != 0 {
		t.Errorf("list by a name that does not exist: %v", images)
	}

	// A container tells the same id, and runs from each name.
	p := w.run(t, "runc")
	for _, name := range []string{repo + ":v1", digested, id} {
		c := p.start(t, "facts", func(c *cri.ContainerConfig) { c.Image = &cri.ImageSpec{Image: name, UserSpecifiedImage: name} })
		s := c.wait(t)
		equal(t, name+": image id of the container", s.ImageId, id)
		equal(t, name+": uid of the process", lastFacts(t, c).UID, 1001)
		if !slices.Contains([]string{name, id}, s.Image.GetImage()) {
			t.Errorf("%s: image of the container is %v", name, s.Image)
		}
	}

	w.removeImage(t, repo+":v1")
	for _, name := range []string{repo + ":v1", repo + ":v2", digested, id} {
		if img := w.imageStatus(t, name); img != nil {
			t.Errorf("%s is still there after the image's removal by one tag: %v", name, img)
		}
	}
	w.removeImage(t, repo+":v1") // again
	w.removeImage(t, id)
}

func TestRemoveImageTakesEveryRepositorysTags(t *testing.T) {
	t.Parallel()
	w := store(t)
	built := unusual(t, "")
	w.Registry.Push("one/app", "a", built)
	w.Registry.Push("two/app", "b", built)
	id := w.pull(t, node.RegistryHost+"/one/app:a")
	equal(t, "id under another name", w.pull(t, node.RegistryHost+"/two/app:b"), id)
	w.removeImage(t, node.RegistryHost+"/two/app:b")
	if img := w.imageStatus(t, node.RegistryHost+"/one/app:a"); img != nil {
		t.Errorf("the other repository's tag is still there: %v", img)
	}
}

func TestImageUserNames(t *testing.T) {
	t.Parallel()
	w := shared(t)
	for user, want := range map[string]struct {
		uid  *cri.Int64Value
		name string
	}{
		"app":       {nil, "app"},
		"app:extra": {nil, "app"},
		"1001":      {&cri.Int64Value{Value: 1001}, ""},
		"0":         {&cri.Int64Value{Value: 0}, ""},
		"":          {&cri.Int64Value{Value: 0}, ""},
	} {
		img := w.imageStatus(t, w.image(t, func(c *imagespec.ImageConfig) { c.User = user }))
		equal(t, "USER "+user+": user name", img.Username, want.name)
		equal(t, "USER "+user+": uid", fmt.Sprint(img.Uid), fmt.Sprint(want.uid))
	}
}

func TestAMovedTag(t *testing.T) {
	t.Parallel()
	w := store(t)
	const ref = node.RegistryHost + "/moving:latest"
	w.Registry.Push("moving", "latest", unusual(t, "old"))
	old := w.pull(t, ref)
	w.Registry.Push("moving", "latest", unusual(t, "new"))
	now := w.pull(t, ref)
	if old == now {
		t.Fatal("the second pull gave the old image")
	}
	equal(t, "image of the tag", w.imageStatus(t, ref).Id, now)
	if img := w.imageStatus(t, old); img == nil || slices.Contains(img.RepoTags, ref) {
		t.Errorf("the old image is %v, want it without the tag", img)
	}
}

func TestPlatformsAndFormats(t *testing.T) {
	t.Parallel()
	w := store(t)
	layer, err := images.Layer()
	if err != nil {
		t.Fatal(err)
	}
	build := func(docker bool, arch, note string) *image.Artifact {
		img := image.Image{Docker: docker, Layers: []image.Layer{layer}, Config: imagespec.ImageConfig{
			Entrypoint: []string{"/probe"}, Labels: map[string]string{"note": note},
		}}
		if arch != "" {
			img.Platform = imagespec.Platform{OS: "linux", Architecture: arch}
		}
		built, err := img.Build()
		if err != nil {
			t.Fatal(err)
		}
		return built
	}
	for _, docker := range []bool{false, true} {
		own, other := build(docker, "", fmt.Sprint(docker)), build(docker, "s390x", fmt.Sprint(docker))
		index, err := image.Index(other, own)
		if err != nil {
			t.Fatal(err)
		}
		w.Registry.Push("multi", "latest", index)
		const repo = node.RegistryHost + "/multi"
		equal(t, "image of an index", w.pull(t, repo+":latest"), own.ID())
		equal(t, "image of an index by digest", w.pull(t, repo+"@"+index.Digest().String()), own.ID())
		if img := w.imageStatus(t, repo+"@"+index.Digest().String()); img == nil {
			t.Error("the image is not known by its index's digest")
		}
		p := w.run(t, "runc")
		equal(t, "output", p.finish(t, "echo runs", func(c *cri.ContainerConfig) { c.Image.Image = repo + ":latest" }), "runs\n")
	}
}

func TestPinnedImages(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: `[image]
pinned_images = ["` + node.RegistryHost + `/exact:latest", "` + node.RegistryHost + `/prefix/*", "*keyword*"]
`})
	for repo, pinned := range map[string]bool{
		"exact": true, "exactly": false, "prefix/x": true, "a/keyword/b": true, "other": false,
	} {
		w.Registry.Push(repo, "latest", unusual(t, repo))
		ref := node.RegistryHost + "/" + repo + ":latest"
		w.pull(t, ref)
		equal(t, repo+" is pinned", w.imageStatus(t, ref).Pinned, pinned)
	}
	w.removeImage(t, node.RegistryHost+"/exact:latest") // pinning is advice only
	if img := w.imageStatus(t, node.RegistryHost+"/exact:latest"); img != nil {
		t.Error("a pinned image could not be removed")
	}
}

func TestImageFsInfo(t *testing.T) {
	t.Parallel()
	w := store(t)
	info := func() *cri.ImageFsInfoResponse {
		resp, err := w.Images().ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if len(resp.ImageFilesystems) != 1 || len(resp.ContainerFilesystems) != 1 {
			t.Fatalf("got %d image and %d container file systems, want one each", len(resp.ImageFilesystems), len(resp.ContainerFilesystems))
		}
		return resp
	}
	before := info()
	for name, fs := range map[string]*cri.FilesystemUsage{"image": before.ImageFilesystems[0], "container": before.ContainerFilesystems[0]} {
		if fs.Timestamp <= 0 || fs.GetFsId().GetMountpoint() == "" || fs.UsedBytes == nil || fs.InodesUsed == nil {
			t.Errorf("the %s file system is incomplete: %v", name, fs)
		}
	}
	if used := before.ImageFilesystems[0].UsedBytes.Value; used < 2<<20 {
		t.Errorf("images use %d bytes, although the probe alone has more", used)
	}

	layer, err := image.NewLayer(image.Regular("filling", 0o644, []byte(numbered(0, 8<<20))))
	if err != nil {
		t.Fatal(err)
	}
	built, err := image.Image{Layers: []image.Layer{layer}}.Build()
	if err != nil {
		t.Fatal(err)
	}
	w.Registry.Push("filling", "latest", built)
	w.pull(t, node.RegistryHost+"/filling:latest")
	grown := info().ImageFilesystems[0].UsedBytes.Value - before.ImageFilesystems[0].UsedBytes.Value
	if grown < 8<<20 || grown > 24<<20 {
		t.Errorf("an image of 8 MiB takes %d bytes", grown)
	}

	p := w.run(t, "runc")
	p.start(t, "sleep").exec(t, "write /file "+strings.Repeat("x", 100_000))
	want := before.ContainerFilesystems[0].UsedBytes.Value + 100_000
	if !eventually(func() bool { return info().ContainerFilesystems[0].UsedBytes.Value >= want }) {
		t.Errorf("containers use %d bytes, want at least %d", info().ContainerFilesystems[0].UsedBytes.Value, want)
	}
	w.removeImage(t, node.RegistryHost+"/filling:latest")
	if !eventually(func() bool {
		return info().ImageFilesystems[0].UsedBytes.Value < before.ImageFilesystems[0].UsedBytes.Value+1<<20
	}) {
		t.Errorf("images use %d bytes after the removal, before %d", info().ImageFilesystems[0].UsedBytes.Value, before.ImageFilesystems[0].UsedBytes.Value)
	}
}

func TestAnImageInUseMayBeRemoved(t *testing.T) {
	t.Parallel()
	w := store(t)
	w.Registry.Push("used", "latest", unusual(t, ""))
	const ref = node.RegistryHost + "/used:latest"
	id := w.pull(t, ref)
	p := w.run(t, "runc")
	c := p.start(t, "sleep", func(c *cri.ContainerConfig) { c.Image.Image = ref })
	w.removeImage(t, ref)
	if img := w.imageStatus(t, ref); img != nil {
		t.Errorf("the image is still listed: %v", img)
	}
	equal(t, "file of the image in the running container", c.exec(t, "cat /note"), t.Name())
	equal(t, "image id of the container", c.status(t).ImageId, id)
	equal(t, "image id after the same pull", w.pull(t, ref), id)
}

// Many pulls of one image at a time are one download.
func TestPullsOfOneImageAreOne(t *testing.T) {
	t.Parallel()
	w := store(t)
	built := unusual(t, "")
	w.Registry.Push("popular", "latest", built)
	// The first pull takes seconds, so that the others ask while it runs.
	w.Registry.Inject(registry.Fault{Path: "/popular/manifests/", Times: 1, Do: registry.Slow(400)})
	w.Registry.Forget()
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			resp, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: node.RegistryHost + "/popular:latest"}})
			if err != nil || resp.ImageRef != built.ID() {
				t.Errorf("PullImage: %v, %v", resp, err)
			}
		})
	}
	group.Wait()
	got := map[string]int{}
	for _, r := range w.Registry.Requests() {
		if r.Method == "GET" && strings.Contains(r.Path, "/blobs/") {
			got[r.Path]++
		}
	}
	for path, n := range got {
		if n > 1 {
			t.Errorf("%s was fetched %d times", path, n)
		}
	}
}

func TestMalformedImageNames(t *testing.T) {
	t.Parallel()
	w := shared(t)
	for _, ref := range []string{
		"", " ", "UPPER/case", "a b", node.RegistryHost + "/x:", node.RegistryHost + "/x@sha256:short",
		node.RegistryHost + "/x:" + strings.Repeat("t", 200), "http://" + node.RegistryHost + "/x", "../../etc/passwd",
		node.RegistryHost + "/x@sha256:" + strings.Repeat("Z", 64), "-flag", "x\x00y",
		strings.Repeat("a/", 1000) + "x", "dir:/etc", "oci:/tmp/x", "docker-archive:/etc/passwd",
	} {
		t.Run(ref, func(t *testing.T) {
			_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}})
			wantCode(t, err, codes.InvalidArgument)
		})
	}
	_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{})
	wantCode(t, err, codes.InvalidArgument)
	_, err = w.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{})
	wantCode(t, err, codes.InvalidArgument)
	_, err = w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{})
	wantCode(t, err, codes.InvalidArgument)
}
