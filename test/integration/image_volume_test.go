package integration

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/image"
	"github.com/crius-run/crius/internal/testkit/node"
)

// imageVolume mounts an image, or what is at sub in it.
func imageVolume(ref, at, sub string) *cri.Mount {
	return &cri.Mount{ContainerPath: at, Image: &cri.ImageSpec{Image: ref}, ImageSubPath: sub, Readonly: true}
}

// hostileVolume has files, and links that try to lead out.
func hostileVolume(t *testing.T, w *world) (ref string) {
	return w.image(t, nil, image.Dir("data"), image.Dir("data/sub"), image.Text("data/sub/file", "of the volume"),
		image.Symlink("data/absolute", "/data/sub"), image.Symlink("data/up", "../../../../../../data"),
		image.Symlink("data/out", "../../../../../../etc/hostname"), image.Symlink("data/loop", "loop"))
}

func TestImageVolumes(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := hostileVolume(t, w)
	id := w.pull(t, ref)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "sleep", withMounts(
			imageVolume(id, "/whole", ""),
			imageVolume(ref, "/whole/data/sub", "data/sub"), // over another
			imageVolume(ref, "/absolute", "data/absolute"),
			imageVolume(ref, "/up", "data/up/sub"),
			imageVolume(ref, "/file", "data/sub/file"),
		))
		for _, file := range []string{"/whole/data/sub/file", "/absolute/file", "/up/file", "/file"} {
			equal(t, file, c.exec(t, "cat "+file), "of the volume")
			if r := c.execResult(t, "write "+file+" x"); r.ExitCode == 0 || !strings.Contains(string(r.Stderr), "read-only") {
				t.Errorf("write %s: code %d, %s", file, r.ExitCode, r.Stderr)
			}
		}
		c.exec(t, "write /data-of-the-container x")
	})
}

func TestImageVolumeRefusals(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := hostileVolume(t, w)
	p := w.run(t, "runc")
	for name, c := range map[string]struct {
		mount *cri.Mount
		code  codes.Code
		says  string
	}{
		"not pulled":     {imageVolume("registry.test/none:1", "/v", ""), codes.NotFound, "registry.test/none:1"},
		"missing":        {imageVolume(ref, "/v", "data/none"), codes.NotFound, "data/none"},
		"leads out":      {imageVolume(ref, "/v", "data/out"), codes.NotFound, "data/out"},
		"leads nowhere":  {imageVolume(ref, "/v", "data/loop"), codes.InvalidArgument, "data/loop"},
		"below a file":   {imageVolume(ref, "/v", "data/sub/file/x"), codes.NotFound, "data/sub/file/x"},
		"dots":           {imageVolume(ref, "/v", "../etc"), codes.InvalidArgument, "image_sub_path"},
		"writable":       {&cri.Mount{ContainerPath: "/v", Image: &cri.ImageSpec{Image: ref}}, codes.InvalidArgument, "readonly"},
		"image and host": {&cri.Mount{ContainerPath: "/v", Image: &cri.ImageSpec{Image: ref}, Readonly: true, HostPath: "/tmp"}, codes.InvalidArgument, "host_path"},
	} {
		_, err := p.try(t.Context(), steps("sleep"), withMounts(c.mount))
		t.Run(name, func(t *testing.T) { wantCode(t, err, c.code, c.says) })
	}
}

// An image that is removed while a container mounts it, and a server that is
// killed, change nothing for the container; afterwards nothing is left of it.
func TestImageVolumeOutlivesImageAndServer(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	ref := hostileVolume(t, w)
	p := w.run(t, "runc")
	c := p.start(t, "sleep", withMounts(imageVolume(ref, "/v", "data")))
	if _, err := w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.Kill(), w.Start(t.Context())); err != nil {
		t.Fatal(err)
	}
	equal(t, "the file", c.exec(t, "cat /v/sub/file"), "of the volume")
	p.vanish(t)
	if err := w.Clean(t.Context(), w.empty, patience); err != nil {
		t.Error(err)
	}
}
