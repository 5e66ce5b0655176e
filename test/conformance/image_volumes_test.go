package main_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/scene"
)

// content is an image without a program, as permitted for volumes (KEP-4639).
func content(t *testing.T, w *scene.World) (ref, id string) {
	t.Helper()
	layer, err := image.NewLayer(
		image.Dir("data"), image.Text("data/a", "from the image"), image.Dir("data/sub"), image.Text("data/sub/b", "deeper"),
		image.Symlink("data/inward", "sub"), image.Symlink("outward", "/etc"), image.Symlink("upward", "../../../../etc"),
		image.Symlink("data/dangling", "nowhere"), image.Text("owned", "x").Owned(1001, 1002), image.Text("for", t.Name()))
	if err != nil {
		t.Fatal(err)
	}
	built, err := image.Image{Layers: []image.Layer{layer}}.Build()
	if err != nil {
		t.Fatal(err)
	}
	ref = w.PushAndPull(t, built)
	return ref, w.Pull(t, ref)
}

func imageVolume(ref, sub string, change ...func(*cri.Mount)) scene.ContainerChange {
	m := &cri.Mount{ContainerPath: "/v", Image: &cri.ImageSpec{Image: ref}, ImageSubPath: sub, Readonly: true}
	for _, f := range change {
		f(m)
	}
	return mounted(m)
}

func TestImageVolume(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	ref, id := content(t, w)
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		for _, name := range []string{id, ref} {
			c := p.Start(t, "sleep", imageVolume(name, ""))
			scene.Equal(t, "content", c.Exec(t, "cat /v/data/a"), "from the image")
			scene.Equal(t, "owner", inside(t, c, "/v/owned"), "1001:1002")
			c.Refuses(t, "write /v/data/a x", "read-only file system")
			c.Refuses(t, "write /v/new x", "read-only file system")
			m := c.Status(t).Mounts[0]
			if m.GetImage().GetImage() != name || !m.Readonly || m.HostPath != "" {
				t.Errorf("the status tells the mount %v", m)
			}
			if got := m.GetImage().GetImageRef(); got != id { // KEP-5365: since PullImage
				t.Errorf("image_ref in the status is %q, want %q", got, id)
			}
			c.Remove(t)
		}
		// Every container has its own mount, and may have several.
		c := p.Start(t, "sleep", imageVolume(id, ""), imageVolume(id, "data/sub", func(m *cri.Mount) { m.ContainerPath = "/w/deep" }))
		scene.Equal(t, "content of the second volume", c.Exec(t, "cat /w/deep/b"), "deeper")
		p.Start(t, "sleep", imageVolume(id, "")).Stop(t, 0)
		scene.Equal(t, "content after another one's end", c.Exec(t, "cat /v/data/sub/b"), "deeper")
	})
}

// Not even a container that may mount can change what other containers will
// see.
func TestImageVolumeStaysReadOnly(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	_, id := content(t, w)
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		p.Start(t, "sleep", imageVolume(id, "")).Refuses(t, "remount /v", "operation not permitted")
		mighty := p.Start(t, "sleep", imageVolume(id, ""), capabilities(&cri.Capability{AddCapabilities: []string{"SYS_ADMIN"}}),
			profiled(newForm, cri.SecurityProfile_Unconfined, ""))
		mighty.ExecResult(t, "/probe", "remount", "/v") // may be refused
		mighty.ExecResult(t, "/probe", "write", "/v/data/a", "spoilt")
		scene.Equal(t, "content for the next container", p.Start(t, "sleep", imageVolume(id, "")).Exec(t, "cat /v/data/a"), "from the image")
	})
}

func TestImageVolumeSubPath(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	_, id := content(t, w)
	refused := []codes.Code{codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition}
	p := w.Pod(t, "crun")
	for sub, file := range map[string]string{"data": "/v/sub/b", "data/sub": "/v/b", "data/sub/": "/v/b", "./data/sub": "/v/b", "data/inward": "/v/b"} {
		t.Run(sub, func(t *testing.T) {
			c := p.Start(t, "sleep", imageVolume(id, sub))
			scene.Equal(t, "content", c.Exec(t, "cat "+file), "deeper")
			c.Refuses(t, "write "+file+" x", "read-only file system")
			scene.Equal(t, "sub path in the status", c.Status(t).Mounts[0].ImageSubPath, sub)
		})
	}
	p.Untouched(t, func() {
		for _, sub := range []string{"..", "../..", "data/../..", "data/../../etc", "/etc", "nowhere", "data/nowhere", "data/a/x", "data/dangling"} {
			t.Run("not "+sub, func(t *testing.T) {
				_, err := p.Try(t.Context(), "sleep", imageVolume(id, sub))
				scene.WantOneOf(t, err, refused, sub)
			})
		}
	})
	// A link in the image leads only into the image.
	p.Untouched(t, func() {
		for _, sub := range []string{"outward", "upward"} {
			t.Run("not "+sub, func(t *testing.T) {
				_, err := p.Try(t.Context(), "sleep", imageVolume(id, sub))
				scene.WantOneOf(t, err, refused, sub)
			})
		}
	})
}

// Kubelets of 1.36 and 1.37 send the sub path of any volume of a pod that has
// an image volume as a path inside an image (makeMounts in kubelet_pods.go).
// The host path includes it already.
func TestSubPathOfAVolumeThatIsNoImage(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	dir := w.Dir(t)
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("of the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	out := w.Pod(t, "runc").Finish(t, "cat /v/file", mounted(&cri.Mount{ContainerPath: "/v", HostPath: dir, ImageSubPath: "below"}))
	if out != "of the host" {
		t.Errorf("the volume's file is %q", out)
	}
}

func TestImageVolumesThatCannotBe(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	_, id := content(t, w)
	cases := map[string]struct {
		volume scene.ContainerChange
		code   codes.Code
		word   string
	}{
		"writable":            {imageVolume(id, "", func(m *cri.Mount) { m.Readonly = false }), codes.InvalidArgument, "readonly"},
		"with a host path":    {imageVolume(id, "", func(m *cri.Mount) { m.HostPath = "/tmp" }), codes.InvalidArgument, "host_path"},
		"not pulled":          {imageVolume(node.RegistryHost+"/never/pulled:latest", ""), codes.NotFound, "never/pulled"},
		"not an image's name": {imageVolume("UPPER:lower:x", ""), codes.InvalidArgument, "UPPER"},
		"no name":             {imageVolume("", ""), codes.InvalidArgument, "image"},
		"propagated":          {imageVolume(id, "", func(m *cri.Mount) { m.Propagation = cri.MountPropagation_PROPAGATION_BIDIRECTIONAL }), codes.InvalidArgument, "propagation"},
	}
	p := w.Pod(t, "crun")
	p.Untouched(t, func() {
		for name, test := range cases {
			t.Run(name, func(t *testing.T) {
				_, err := p.Try(t.Context(), "sleep", test.volume)
				scene.WantCode(t, err, test.code, test.word)
			})
		}
	})
}

// A volume may be a file of an image, hold programs, and have other volumes on its directories.
func TestUsesOfImageVolumes_kubernetes_135775_podman_4329(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	_, id := content(t, w)
	dir := w.Dir(t)
	scene.Write(t, filepath.Join(dir, "file"), "of the host")
	at := func(path string) func(*cri.Mount) { return func(m *cri.Mount) { m.ContainerPath = path } }
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		scene.Equal(t, "a file", p.Finish(t, "cat /new/place", imageVolume(id, "data/a", at("/new/place"))), "from the image")
		scene.Equal(t, "a program", p.Finish(t, "run /v/probe echo runs", imageVolume(images.Probe, "")), "runs\n")
		scene.Equal(t, "others in it", p.Finish(t, "cat /v/data/sub/data/a ; cat /v/data/a",
			imageVolume(id, "", at("/v/data/sub")), imageVolume(id, "")), "from the imagefrom the image")
		scene.Equal(t, "a host path in it", p.Finish(t, "cat /v/data/sub/file",
			imageVolume(id, ""), mounted(&cri.Mount{ContainerPath: "/v/data/sub", HostPath: dir})), "of the host")
		scene.Equal(t, "below a read-only root", p.Finish(t, "cat /new/place/data/a",
			imageVolume(id, "", at("/new/place")), func(c *cri.ContainerConfig) { c.Linux.SecurityContext.ReadonlyRootfs = true }), "from the image")
	})
}

// The kubelet counts failed image volumes by the beginning of CreateContainer's
// message, whatever its code.
func TestImageVolumeErrorsThatTheKubeletCounts(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	_, id := content(t, w)
	p := w.Pod(t, "runc")
	for name, volume := range map[string]scene.ContainerChange{
		"no such sub path": imageVolume(id, "nowhere"), "not pulled": imageVolume(node.RegistryHost+"/never/pulled:latest", ""),
	} {
		_, err := p.Try(t.Context(), "sleep", volume)
		if !strings.HasPrefix(status.Convert(err).Message(), crierrors.ErrImageVolumeMountFailed.Error()) {
			t.Errorf("%s: the message does not begin with %v: %v", name, crierrors.ErrImageVolumeMountFailed, err)
		}
	}
}

// An image that a container has mounted is not removed.
func TestImageOfAVolumeIsNotRemoved(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	ref, id := content(t, w)
	p := w.Pod(t, "runc")
	c := p.Start(t, "sleep", imageVolume(id, "data"))
	_, err := w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
	scene.WantCode(t, err, codes.FailedPrecondition, "in use by container "+c.ID)
	scene.Equal(t, "content", c.Exec(t, "cat /v/a"), "from the image")
	c.Remove(t)
	if _, err := w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: id}}); err != nil {
		t.Errorf("once nobody uses it: %v", err)
	}
}

func TestImageVolumeSurvivesARestart(t *testing.T) {
	t.Parallel()
	w := scene.Private(t, node.Options{})
	_, id := content(t, w)
	used := func() uint64 {
		resp, err := w.Images().ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
		if err != nil || len(resp.ImageFilesystems) == 0 {
			t.Fatalf("ImageFsInfo: %v, %v", resp, err)
		}
		return resp.ImageFilesystems[0].GetUsedBytes().GetValue()
	}
	before := used()
	var all []*scene.Container
	for _, handler := range scene.Handlers {
		all = append(all, w.Pod(t, handler).Start(t, "sleep", imageVolume(id, "data")))
	}
	if after := used(); after > before+64*1024 {
		t.Errorf("the images take %d bytes with the volumes mounted, and %d before", after, before)
	}
	for _, again := range []func(context.Context) error{w.Restart, w.Crash} {
		if err := again(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, c := range all {
			scene.Equal(t, "content", c.Exec(t, "cat /v/a"), "from the image")
			next := c.Pod.Start(t, "sleep", imageVolume(id, "data/sub"))
			scene.Equal(t, "content for a new container", next.Exec(t, "cat /v/b"), "deeper")
			scene.Equal(t, "image in the status", c.Status(t).Mounts[0].GetImage().GetImage(), id)
		}
	}
}
