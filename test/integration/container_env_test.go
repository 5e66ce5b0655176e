package integration

import (
	"os"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
)

// Programs look for /run/.containerenv to find out whether they are in a container. It is never
// on the node, not even if the container has the node's /run (podman#25655).
func TestContainersAreMarked_crio_5461(t *testing.T) {
	t.Parallel()
	w := shared(t)
	const mark = "/run/.containerenv"
	linked := w.image(t, nil, image.Symlink("run", "/var/run"))
	volume := w.image(t, func(c *imagespec.ImageConfig) { c.User, c.Volumes = "4711:4711", map[string]struct{}{"/run": {}} })
	odd := w.image(t, nil, image.Text("run", "a file"))
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for name, change := range map[string]containerChange{
			"plain":     func(*cri.ContainerConfig) {},
			"read-only": readOnlyRoot,
			"link":      ofImage(linked),
			"user":      func(c *cri.ContainerConfig) { c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 4711} },
		} {
			c := p.start(t, "sleep", change)
			equal(t, name, c.exec(t, "cat "+mark), "")
			equal(t, name, c.exec(t, "stat "+mark)[:11], "100644 0 0 ")
		}
		c := p.start(t, "sleep", ofImage(volume))
		equal(t, "volume at /run", c.exec(t, "stat /run")[:15], "40755 4711 4711")
		equal(t, "output without the mark", p.finish(t, "echo hello", ofImage(odd)), "hello\n")
		run := w.dir(t)
		c = p.start(t, "sleep", withMounts(&cri.Mount{ContainerPath: "/run", HostPath: run}))
		c.remove(t)
		entries, err := os.ReadDir(run)
		must(t, err)
		equal(t, "files in a directory of the node", len(entries), 0)
	})
	ofPod, ofContainer := inUserNamespace()
	c := fixed(t).run(t, "runc", ofPod).start(t, "sleep", ofContainer)
	equal(t, "user namespace", c.exec(t, "stat "+mark)[:11], "100644 0 0 ")
}
