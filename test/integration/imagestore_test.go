package integration

import (
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
)

// With images in their own directory pods run as usual, also after a crash of
// the server, and the file systems of images and of containers are reported
// separately (KEP-4191).
func TestImagesInDirectoryOfTheirOwn(t *testing.T) {
	t.Parallel()
	images := t.TempDir()
	w := private(t, node.Options{Config: "[image]\nimagestore = '" + images + "'\n"})
	ref := w.unusual(t, "apart")
	id := w.pull(t, ref)
	c := w.run(t, "crun").start(t, "sleep", func(c *cri.ContainerConfig) { c.Image.Image = ref })
	must(t, w.Crash(t.Context()))
	resp, err := w.Images().ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
	must(t, err)
	equal(t, "file system of images", resp.ImageFilesystems[0].GetFsId().GetMountpoint(), images)
	if at := resp.ContainerFilesystems[0].GetFsId().GetMountpoint(); at == images || at == "" {
		t.Errorf("containers are at %q", at)
	}
	equal(t, "file of the image", c.exec(t, "cat /note"), t.Name())
	equal(t, "image", w.imageStatus(t, ref).GetId(), id)
	before := resp.ImageFilesystems[0].GetUsedBytes().GetValue()
	c.remove(t)
	_, err = w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
	must(t, err)
	resp, err = w.Images().ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
	must(t, err)
	if after := resp.ImageFilesystems[0].GetUsedBytes().GetValue(); after >= before {
		t.Errorf("images have %d bytes after the removal, %d before", after, before)
	}
}
