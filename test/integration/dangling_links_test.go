package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
)

// A link of the image may lead to a directory that the image lacks, as /var/run to /run. What
// is mounted there, or below, is where the link leads, with every runtime: crun and current
// runc (runc#5090) fail at such links.
func TestMountsThroughDanglingLinks_runc_5090(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, handler string) { shared(t).mountsThroughLinks(t, handler) })
	t.Run("current runc", func(t *testing.T) { fixed(t).mountsThroughLinks(t, "runc") })
}

func (w *world) mountsThroughLinks(t *testing.T, handler string) {
	t.Helper()
	ref := w.image(t, nil,
		image.Symlink("var/lock", "/gone/lock"), image.Symlink("up", "../../gone/up"), image.Symlink("chain", "/var/chain"),
		image.Symlink("var/chain", "deep/er"), image.Symlink("dots", "/gone/../other"), image.Symlink("data", "/run/inside/data"),
		image.Symlink("depth", "/gone"+strings.Repeat("/d", 40)), image.Symlink("cwd", "/gone/cwd"),
		image.Symlink("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"), image.Symlink("etc/hostname", "/gone/hostname"), image.Symlink("file", "gone/file"))
	host := w.dir(t)
	must(t, os.WriteFile(filepath.Join(host, "name"), []byte("mounted"), 0o644))
	p := w.run(t, handler)
	for place, file := range map[string]string{
		"/var/lock":      "/gone/lock/name",
		"/var/lock/a/b":  "/gone/lock/a/b/name",
		"/up":            "/gone/up/name",
		"/chain":         "/var/deep/er/name",
		"/chain/below":   "/var/deep/er/below/name",
		"/new/directory": "/new/directory/name",
		"/dots":          "/other/name",
		"/depth":         "/gone" + strings.Repeat("/d", 40) + "/name",
	} {
		c := p.start(t, "sleep", ofImage(ref), withMounts(&cri.Mount{ContainerPath: place, HostPath: host}))
		equal(t, "file mounted at "+place, c.exec(t, "cat "+file), "mounted")
	}
	// A link may lead into another mount.
	run := w.dir(t)
	c := p.start(t, "sleep", ofImage(ref), withMounts(&cri.Mount{ContainerPath: "/data", HostPath: host}, &cri.Mount{ContainerPath: "/run", HostPath: run}))
	equal(t, "file mounted inside another mount", c.exec(t, "cat /run/inside/data/name"), "mounted")
	equal(t, "the same by the link", c.exec(t, "cat /data/name"), "mounted")
	// So may the working directory, which is made as any other one.
	c = p.start(t, "sleep", ofImage(ref), func(c *cri.ContainerConfig) { c.WorkingDir = "/cwd/below" })
	equal(t, "mode of the working directory", c.exec(t, "stat /gone/cwd/below")[:6], "40755 ")
	for place, file := range map[string]string{"/file": "/gone/file", "/var/lock/file": "/gone/lock/file", "/chain": "/var/deep/er"} {
		c := p.start(t, "sleep", ofImage(ref), withMounts(&cri.Mount{ContainerPath: place, HostPath: filepath.Join(host, "name")}))
		equal(t, "mounted at "+place, c.exec(t, "cat "+file), "mounted")
	}
}
