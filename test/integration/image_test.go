package integration

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
)

// unusual pushes a unique image to its own repository, and returns its name. It
// has the test's name in the file /note.
func (w *world) unusual(t *testing.T, repo string, files ...image.File) (ref string) {
	t.Helper()
	built, err := images.Build(nil, append(files, image.Text("note", t.Name()))...)
	if err != nil {
		t.Fatal(err)
	}
	w.Registry.Push(repo, "latest", built)
	return node.RegistryHost + "/" + repo + ":latest"
}

func (w *world) imageStatus(t *testing.T, ref string) *cri.Image {
	t.Helper()
	resp, err := w.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref}})
	if err != nil {
		t.Fatalf("ImageStatus %s: %v", ref, err)
	}
	return resp.Image
}

func (w *world) listImages(t *testing.T, filter *cri.ImageFilter) []*cri.Image {
	t.Helper()
	resp, err := w.Images().ListImages(t.Context(), &cri.ListImagesRequest{Filter: filter})
	if err != nil {
		t.Fatalf("ListImages: %v", err)
	}
	return resp.Images
}

func TestImageFsInfo(t *testing.T) {
	t.Parallel()
	resp, err := shared(t).Images().ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.ImageFilesystems) != 1 || len(resp.ContainerFilesystems) != 1 {
		t.Fatalf("got %d image and %d container file systems, want one each", len(resp.ImageFilesystems), len(resp.ContainerFilesystems))
	}
	for _, fs := range slices.Concat(resp.ImageFilesystems, resp.ContainerFilesystems) {
		if fs.Timestamp <= 0 || fs.GetFsId().GetMountpoint() == "" || fs.UsedBytes == nil || fs.InodesUsed == nil {
			t.Errorf("incomplete: %v", fs)
		}
	}
	if used := resp.ImageFilesystems[0].UsedBytes.Value; used < 2*mib {
		t.Errorf("images use %d bytes, although the probe alone has more", used)
	}
}

// Images that containers use, also as volumes, are not removed, neither by crictl rmi --all nor by
// the garbage collection of a kubelet before 1.30, so that a restart needs no registry. All others are.
func TestImagesInUseAreNotRemoved_crio_7143(t *testing.T) {
	t.Parallel()
	w := shared(t)
	refs := map[string]string{}
	for _, use := range []string{"created", "running", "exited", "volume", "unused"} {
		refs[use] = w.unusual(t, "in-use/"+use, image.Text("use", use))
	}
	refs["artifact"], _ = w.artifact(t)
	ids := map[string]string{}
	for use, ref := range refs {
		ids[w.pull(t, ref)] = use
	}
	p := w.run(t, "crun")
	all := map[string]*container{
		"created": p.create(t, "sleep", ofImage(refs["created"]), withMounts(ofArtifact(refs["artifact"], ""))),
		"running": p.start(t, "sleep", ofImage(refs["running"]), withMounts(&cri.Mount{ContainerPath: "/volume", Readonly: true, Image: &cri.ImageSpec{Image: refs["volume"]}})),
		"exited":  p.start(t, "exit 0", ofImage(refs["exited"])),
	}
	all["exited"].wait(t)
	inUse := map[string]bool{}
	listed, err := w.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: p.id}})
	must(t, err)
	for _, c := range listed.Containers {
		inUse[c.ImageRef] = true // so do kubelets before 1.30
	}
	for _, i := range w.listImages(t, nil) {
		use, mine := ids[i.Id]
		if !mine {
			continue
		}
		if wanted := use == "created" || use == "running" || use == "exited"; inUse[i.Id] != wanted {
			t.Errorf("a kubelet takes the image for %s for used: %t", use, inUse[i.Id])
		}
		for _, ref := range []string{i.Id, refs[use]} {
			_, err := w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
			if use != "unused" {
				wantCode(t, err, codes.FailedPrecondition, "in use by container")
			} else if err != nil {
				t.Errorf("RemoveImage of an unused image: %v", err)
			}
		}
	}
	for id, use := range ids {
		if img := w.imageStatus(t, refs[use]); (img.GetId() == id) != (use != "unused") {
			t.Errorf("by the name of the image for %s: %v", use, img)
		}
	}
	for use, c := range all { // as the kubelet does after a crash of each
		c.stop(t, 0)
		again := p.finish(t, "cat /use", func(next *cri.ContainerConfig) {
			next.Metadata.Name, next.Metadata.Attempt = c.config.Metadata.Name, 1
			next.Image = &cri.ImageSpec{Image: c.status(t).ImageId, UserSpecifiedImage: refs[use]}
		})
		equal(t, "file of the image for "+use, again, use)
	}
	p.stop(t)
	p.remove(t)
	for id, use := range ids {
		if _, err := w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: id}}); err != nil {
			t.Errorf("RemoveImage of the image for %s without its container: %v", use, err)
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

func TestPullErrorsHaveTheirCodes(t *testing.T) {
	t.Parallel()
	w := shared(t)
	for ref, code := range map[string]codes.Code{
		node.RegistryHost + "/no/such/repository:latest": codes.NotFound,
		"unreachable.test:9/x:latest":                    codes.Unknown, // as a kubelet expects
	} {
		_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}})
		wantCode(t, err, code, strings.Split(ref, ":")[0])
	}
}

// A pull outlives the client that requested it.
func TestPullGoesOnWithoutItsCaller(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.unusual(t, "goes-on")
	asked, gone := make(chan struct{}), make(chan struct{})
	w.Registry.Inject(registry.Fault{Path: "/goes-on/manifests/", Times: 1, Do: func(answer http.Handler, stop <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			close(asked)
			select {
			case <-gone: // the caller
			case <-stop:
			}
			answer.ServeHTTP(w, req)
		})
	}})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { // whatever the result of the pull
		<-asked
		cancel()
	}()
	_, err := w.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}})
	wantCode(t, err, codes.Canceled)
	close(gone)
	wait.For(t, "the image", func() bool { return w.imageStatus(t, ref) != nil })
}

// Pods name an image by a name or its complete id. A part of an id, which can
// be guessed, names no image for pods, and with the prefix "sha256:" removes
// none; people may type it without the prefix.
func TestPartsOfImageIDsAreForPeople(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.unusual(t, "guessed")
	id := w.pull(t, ref)
	p := w.run(t, "crun")
	asked := func(ref string) containerChange {
		return func(c *cri.ContainerConfig) { c.Image = &cri.ImageSpec{Image: ref, UserSpecifiedImage: ref} }
	}
	volume := func(ref string) containerChange {
		return func(c *cri.ContainerConfig) {
			c.Mounts = append(c.Mounts, &cri.Mount{ContainerPath: "/v", Image: &cri.ImageSpec{Image: ref}, Readonly: true})
		}
	}
	for _, part := range []string{id[:3], id[:12], id[:63], "sha256:" + id[:3], "sha256:" + id[:63]} {
		for _, change := range []containerChange{asked(part), volume(part)} {
			_, err := p.try(t.Context(), steps("sleep"), change)
			wantCode(t, err, codes.NotFound, "image "+part, "64 digits")
		}
		if strings.HasPrefix(part, "sha256:") && w.imageStatus(t, part) != nil {
			t.Errorf("ImageStatus finds %s", part)
		}
	}
	for _, whole := range []string{id, "sha256:" + id} {
		p.create(t, "sleep", asked(whole), volume(whole)).remove(t)
		_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: whole}})
		wantCode(t, err, codes.InvalidArgument, "image ID")
	}
	remove := func(ref string) {
		t.Helper()
		if _, err := w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}}); err != nil {
			t.Errorf("RemoveImage %s: %v", ref, err)
		}
	}
	remove("sha256:" + id[:63])
	if img := w.imageStatus(t, id[:63]); img.GetId() != id {
		t.Errorf("by 63 digits: %v", img)
	}
	remove(id[:63]) // crictl rmi sends what was typed
	if img := w.imageStatus(t, id); img != nil {
		t.Errorf("still there: %v", img)
	}
}
