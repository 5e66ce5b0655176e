package integration

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/storage/unpack/wire"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
)

// pullWorkers returns the number of processes in a cgroup that unpack images.
func pullWorkers(cgroupPath string) (workers int) {
	pids, _ := cgroup.Procs(cgroupPath)
	for _, pid := range pids {
		if line, _ := os.ReadFile(filepath.Join("/proc", fmt.Sprint(pid), "cmdline")); string(line) == wire.Name+"\x00" {
			workers++
		}
	}
	return workers
}

// An image is unpacked in the cgroup for pulls, or in that of the pod for which
// it is pulled. The cgroup is removed with the pull, or by the next start or a
// wipe if the server was killed.
func TestPullCgroup(t *testing.T) {
	t.Parallel()
	for value, parent := range map[string]string{"/{{.ID}}/pulls": "pulls", "pod": "pods/podx"} {
		t.Run(parent, func(t *testing.T) {
			t.Parallel()
			w := private(t, node.Options{Config: "[image]\npull_cgroup = \"" + value + "\"\n"})
			parent := "/" + w.ID + "/" + parent
			must(t, cgroup.Make(parent))
			t.Cleanup(func() {
				for _, dir := range inventory.Cgroups(parent) {
					_ = os.Remove(dir)
				}
			})
			p := w.run(t, handlers[0], func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent = parent })
			data, err := io.ReadAll(noise(4 * mib))
			must(t, err)
			ref := w.unusual(t, "large", image.Regular("noise", 0o644, data))
			pull := func() error {
				_, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}, SandboxConfig: p.config})
				return err
			}
			killAmidPull := func(path string, after int) {
				ended := make(chan error, 1)
				w.Registry.Inject(registry.Fault{Path: path, Do: registry.Stall(after)})
				go func() { ended <- pull() }()
				wait.For(t, "a worker in the cgroup", func() bool { return pullWorkers(parent+"/crius-pulls") == 1 })
				must(t, w.Kill())
				<-ended
				w.Registry.Heal()
				wait.For(t, "the worker to end", func() bool { pids, _ := cgroup.Procs(parent + "/crius-pulls"); return len(pids) == 0 })
			}
			for path, after := range map[string]int{"/large/manifests/": 0, "/large/blobs/": 3 * mib} { // before and after it has its order
				killAmidPull(path, after)
				must(t, w.Start(t.Context()))
				if left := inventory.Cgroups(parent + "/crius-pulls"); len(left) > 0 {
					t.Errorf("left of the server that was killed: %q", left)
				}
			}
			must(t, pull())
			if left := inventory.Cgroups(parent + "/crius-pulls"); len(left) > 0 {
				t.Errorf("left of a pull: %q", left)
			}
			_, err = w.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
			must(t, err)
			killAmidPull("/large/manifests/", 0)
			if out, code := w.wipe(t, "", "--yes"); code != 0 {
				t.Fatalf("code %d: %s", code, out)
			}
			if left := inventory.Cgroups(parent + "/crius-pulls"); len(left) > 0 {
				t.Errorf("left of a wipe: %q", left)
			}
			must(t, w.Start(t.Context()))
		})
	}
}
