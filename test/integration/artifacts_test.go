package integration

import (
	"context"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
)

// artifact pushes and pulls an OCI artifact.
func (w *world) artifact(t *testing.T) (ref, id string) {
	t.Helper()
	built, err := image.Files{"config.json": "{}", "weights/part-1": "weights of " + t.Name()}.Build()
	must(t, err)
	return w.PushAndPull(t, built), built.Digest().Encoded()
}

func ofArtifact(ref, subPath string) *cri.Mount {
	return &cri.Mount{ContainerPath: "/model", Readonly: true, Image: &cri.ImageSpec{Image: ref}, ImageSubPath: subPath}
}

// Containers can mount an artifact, or a directory or a file of it, and can
// only read it.
func TestArtifactAsImageVolume(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref, id := w.artifact(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for subPath, file := range map[string]string{"": "/model/weights/part-1", "weights": "/model/part-1", "weights/part-1": "/model"} {
			c := p.start(t, "sleep", withMounts(ofArtifact(ref, subPath)))
			if got := c.exec(t, "cat "+file); !strings.HasPrefix(got, "weights of ") {
				t.Errorf("sub path %q: %s has %q", subPath, file, got)
			}
			c.cannotWrite(t, file, "/model/new")
			status := c.status(t).Mounts[0]
			if status.GetImage().GetImage() != ref || status.GetImage().GetImageRef() != id || status.ImageSubPath != subPath {
				t.Errorf("mount in the status: %v", status)
			}
		}
		_, err := p.try(t.Context(), []string{"sleep"}, withMounts(ofArtifact(id, "missing")))
		wantCode(t, err, codes.NotFound, "image_sub_path")
		_, err = p.try(t.Context(), []string{"sleep"}, ofImage(ref))
		wantCode(t, err, codes.InvalidArgument, "is an OCI artifact", "image volume")
	})
}

func TestArtifactInUserNamespace(t *testing.T) {
	t.Parallel()
	w := fixed(t)
	ref, _ := w.artifact(t)
	ofPod, ofContainer := inUserNamespace()
	c := w.run(t, "runc", ofPod).start(t, "sleep", ofContainer, withMounts(ofArtifact(ref, "")))
	if got := c.exec(t, "stat /model/config.json"); !strings.HasPrefix(got, "100444 0 0 ") {
		t.Errorf("mode and owner are %s", got)
	}
}

// An artifact exists as long as a container mounts it, across restarts and
// crashes of the server; crius check reports nothing wrong with it, and crius
// wipe removes it.
func TestArtifactAcrossRestarts(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	ref, id := w.artifact(t)
	spec := &cri.ImageSpec{Image: ref}
	status, err := w.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: spec, Verbose: true})
	must(t, err)
	if status.Image.GetId() != id || !strings.Contains(status.Info["info"], `"path":"weights/part-1"`) {
		t.Errorf("status: %v", status)
	}
	c := w.run(t, "crun").start(t, "sleep", withMounts(ofArtifact(ref, "")))
	w.silent(t, "a container that mounts an artifact")
	for _, again := range []func(context.Context) error{w.Restart, w.Crash} {
		must(t, again(t.Context()))
		_, err = w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: spec})
		wantCode(t, err, codes.FailedPrecondition, "in use by container "+c.id)
		equal(t, "images", w.counts(t)[2], 2) // one is the probe's
		equal(t, "file", c.exec(t, "cat /model/config.json"), "{}")
		w.silent(t, "an artifact in use")
	}
	c.remove(t)
	_, err = w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: spec})
	must(t, err)
	w.artifact(t)
	equal(t, "images", w.counts(t)[2], 2)
	if out, code := w.wipe(t, "", "--yes"); code != 0 || !strings.Contains(out, "images 2") {
		t.Errorf("code %d: %s", code, out)
	}
}

// Pods mount artifacts from a disk that others have filled and from which
// nothing is removed.
func TestArtifactOnSharedDisk(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[image]\nadditional_artifact_stores = [\"{{.Path \"shared\"}}\"]\n"})
	ref, id := w.artifact(t)
	must(t, os.CopyFS(w.Path("shared/crius-artifacts"), os.DirFS(w.Path("img/crius-artifacts"))))
	spec := &cri.ImageSpec{Image: ref}
	_, err := w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: spec})
	must(t, err)
	must(t, w.Restart(t.Context()))
	status, err := w.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: spec})
	must(t, err)
	if status.Image.GetId() != id || !status.Image.GetPinned() {
		t.Errorf("status: %v", status)
	}
	equal(t, "pulled", w.Pull(t, ref), id)
	c := w.run(t, "crun").start(t, "sleep", withMounts(ofArtifact(ref, "")))
	equal(t, "file", c.exec(t, "cat /model/config.json"), "{}")
	_, err = w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: spec})
	wantCode(t, err, codes.FailedPrecondition, w.Path("shared"))
	must(t, w.Crash(t.Context()))
	w.silent(t, "a container that mounts an artifact from a shared disk")
	if out, code := w.wipe(t, "", "--yes"); code != 0 || !strings.Contains(out, "images 1") {
		t.Errorf("code %d: %s", code, out)
	}
	if left, err := os.ReadDir(w.Path("shared/crius-artifacts/artifacts")); err != nil || len(left) != 1 {
		t.Errorf("on the shared disk: %v, %v", left, err)
	}
}
