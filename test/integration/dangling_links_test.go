package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/nriplugin"
	"github.com/crius-run/crius/test/kit/tools"
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

// So does what the node adds: devices, its own files, those of mounts.conf, CDI and plugins. A link
// that another mount hides leads nowhere.
func TestWhatTheNodeAddsFollowsDanglingLinks_runc_5090(t *testing.T) {
	t.Parallel()
	runc, err := tools.Runc(t.Context())
	must(t, err)
	host := t.TempDir()
	put(t, filepath.Join(host, "name"), "mounted")
	put(t, filepath.Join(host, "mounts.conf"), host+":/var/lock/conf\n")
	put(t, filepath.Join(host, "acme.json"), fmt.Sprintf(`{"cdiVersion": "0.6.0", "kind": "acme.test/dev", "devices": [{"name": "one", "containerEdits": {
		"mounts": [{"containerPath": "/var/lock/cdi", "hostPath": %q, "options": ["ro", "bind"]}],
		"deviceNodes": [{"path": "/var/lock/cdi-device", "hostPath": "/dev/zero", "permissions": "rw"}]}},
		{"name": "two", "containerEdits": {"mounts": [{"containerPath": "/var/lock/cdi-of-plugin", "hostPath": %q, "options": ["ro", "bind"]}]}}]}`, host, host))
	w := private(t, node.Options{Config: fmt.Sprintf("[pod]\nmounts_files = [%q]\ncdi_spec_dirs = [%q]\n[runtime.handlers.modern]\npath = %q\n",
		filepath.Join(host, "mounts.conf"), host, runc)})
	w.Plugin(t, "10", &nriplugin.Plugin{Create: func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
		a := &api.ContainerAdjustment{}
		a.AddMount(&api.Mount{Destination: "/var/lock/plugin", Type: "bind", Source: host, Options: []string{"rbind", "ro"}})
		a.AddCDIDevice(&api.CDIDevice{Name: "acme.test/dev=two"}) // cri-o#9128: was dropped without a word
		return a, nil, nil
	}})
	ref := w.image(t, nil, image.Symlink("var/lock", "/gone/lock"), image.Symlink("etc", "usr/lost/etc"), image.Symlink("volume/link", "/gone/hidden"))
	for _, handler := range []string{"runc", "modern", "crun"} {
		t.Run(handler, func(t *testing.T) {
			c := w.run(t, handler).start(t, "sleep", ofImage(ref), func(c *cri.ContainerConfig) {
				c.CDIDevices = []*cri.CDIDevice{{Name: "acme.test/dev=one"}}
				c.Devices = []*cri.Device{{HostPath: "/dev/zero", ContainerPath: "/var/lock/device", Permissions: "rw"}}
				c.Mounts = append(c.Mounts, &cri.Mount{ContainerPath: "/volume", HostPath: w.dir(t)}, &cri.Mount{ContainerPath: "/volume/link", HostPath: host})
			})
			for _, file := range []string{"/gone/lock/conf/name", "/gone/lock/cdi/name", "/gone/lock/cdi-of-plugin/name", "/gone/lock/plugin/name", "/volume/link/name"} {
				equal(t, file, c.exec(t, "cat "+file), "mounted")
			}
			for _, device := range []string{"/gone/lock/device", "/gone/lock/cdi-device"} {
				equal(t, device, c.exec(t, "open "+device+" rw"), "ok\n")
			}
			equal(t, "host name in /etc", c.exec(t, "cat /etc/hostname"), c.exec(t, "cat /proc/sys/kernel/hostname"))
		})
	}
}
