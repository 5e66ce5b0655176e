package integration

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
)

// declaresVolumes is an image with a volume that its layers lack, and one that
// they contain.
func (w *world) declaresVolumes(t *testing.T) string {
	t.Helper()
	home := image.Dir("home/app").Owned(1000, 1001)
	return w.image(t, func(c *imagespec.ImageConfig) {
		c.User = "1000:1001"
		c.Volumes = map[string]struct{}{"/data": {}, "/srv/deep/data": {}, "/home/app": {}, "/link/data": {}, "relative": {}, "/etc/hosts": {}}
	}, home, image.Text("home/app/file", "the image's").Owned(1000, 1001), image.Symlink("link", "/home"))
}

// ofImage keeps the test's command.
func ofImage(ref string) containerChange {
	return func(c *cri.ContainerConfig) { c.Image.Image = ref }
}

// inUserNamespace gives a pod and its containers a user namespace.
func inUserNamespace() (podChange, containerChange) {
	ids := []*cri.IDMapping{{HostId: 1 << 21, Length: 1 << 16}}
	users := &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: ids, Gids: ids}
	return func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = users },
		func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = users }
}

func readOnlyRoot(c *cri.ContainerConfig) { c.Linux.SecurityContext.ReadonlyRootfs = true }

// ownsVolumes checks that the volumes made by crius belong to the container's
// user.
func (c *container) ownsVolumes(t *testing.T) {
	t.Helper()
	for _, dir := range []string{"/data", "/srv/deep/data", "/home/data"} {
		if got := c.exec(t, "stat "+dir); !strings.HasPrefix(strings.TrimSpace(got), "40755 1000 1001") {
			t.Errorf("%s: mode and owner are %s", dir, got)
		}
	}
	equal(t, "file of the image", c.exec(t, "cat /home/app/file"), "the image's")
}

func (c *container) cannotWrite(t *testing.T, files ...string) {
	t.Helper()
	for _, file := range files {
		if r := c.execResult(t, "write "+file+" x"); r.ExitCode == 0 {
			t.Errorf("%s can be written", file)
		}
	}
}

func TestVolumesOfImagesAreMade(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.declaresVolumes(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "sleep", ofImage(ref))
		c.ownsVolumes(t)
		c.exec(t, "write /data/file x")
		c.exec(t, "write /home/app/new x")
		c = p.start(t, "sleep", ofImage(ref), readOnlyRoot)
		c.ownsVolumes(t)
		c.cannotWrite(t, "/data/file", "/home/app/new")
	})
}

func TestVolumesOfImagesInUserNamespaces(t *testing.T) {
	t.Parallel()
	w := fixed(t)
	ofPod, ofContainer := inUserNamespace()
	c := w.run(t, "runc", ofPod).start(t, "sleep", ofImage(w.declaresVolumes(t)), ofContainer)
	c.ownsVolumes(t)
	c.exec(t, "write /data/file x")
}

// The kubelet mounts a service account's token below /var/run, which in most images leads to /run.
func TestMountsBelowVolumesOfImages_containerd_11852(t *testing.T) {
	t.Parallel()
	w := fixed(t)
	ref := w.image(t, func(c *imagespec.ImageConfig) { c.Volumes = map[string]struct{}{"/run": {}} },
		image.Dir("run"), image.Dir("var"), image.Symlink("var/run", "/run"))
	volume := w.dir(t)
	put(t, filepath.Join(volume, "token"), "secret")
	must(t, errors.Join(os.Chmod(volume, 0o755), os.Chmod(filepath.Join(volume, "token"), 0o644)))
	ofPod, ofContainer := inUserNamespace()
	c := w.run(t, "runc", ofPod).start(t, "sleep", ofImage(ref), ofContainer,
		withMounts(&cri.Mount{ContainerPath: "/var/run/secrets/kubernetes.io/serviceaccount", HostPath: volume, Readonly: true}))
	equal(t, "token", c.exec(t, "cat /run/secrets/kubernetes.io/serviceaccount/token"), "secret")
}

func TestBoundVolumesOfImages(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{Config: "[image]\nvolumes = \"bind\"\n"})
	ref := w.declaresVolumes(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "sleep", ofImage(ref), readOnlyRoot)
		c.ownsVolumes(t)
		for _, file := range []string{"/data/file", "/home/app/new", "/home/app/file", "/srv/deep/data/file"} {
			c.exec(t, "write "+file+" written")
			equal(t, file, c.exec(t, "cat "+file), "written")
		}
		c.cannotWrite(t, "/srv/deep/file", "/home/file", "/etc/hosts")
		fresh := p.start(t, "sleep", ofImage(ref), readOnlyRoot)
		fresh.ownsVolumes(t)

		volume := w.dir(t)
		put(t, filepath.Join(volume, "file"), "the pod's")
		if err := os.Chmod(volume, 0o755); err != nil { // the container's user is not root
			t.Fatal(err)
		}
		c = p.start(t, "sleep", ofImage(ref), readOnlyRoot, withMounts(&cri.Mount{ContainerPath: "/data", HostPath: volume, Readonly: true},
			&cri.Mount{ContainerPath: "/home", HostPath: volume, Readonly: true}))
		for _, file := range []string{"/data/file", "/home/file"} {
			equal(t, file, c.exec(t, "cat "+file), "the pod's")
		}
		c.cannotWrite(t, "/data/file", "/home/file")
		p.remove(t)
	})
}
