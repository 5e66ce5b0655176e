package integration

import (
	"os"
	"path/filepath"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
)

// A create that fails leaves no empty log: a kubelet without a container counts logs to find out
// how often it was restarted. A log that was there before stays.
func TestFailedCreateLeavesNoLog(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	file := filepath.Join(w.dir(t), "file")
	must(t, os.WriteFile(file, nil, 0o644))
	onDirectory := withMounts(&cri.Mount{ContainerPath: "/tmp", HostPath: file})
	for _, handler := range handlers {
		p := w.run(t, handler)
		dir := p.config.LogDirectory
		logs := func() (names []string) {
			entries, err := os.ReadDir(dir)
			must(t, err)
			for _, e := range entries {
				names = append(names, e.Name())
			}
			return names
		}
		before := filepath.Join(dir, "before.log")
		must(t, os.WriteFile(before, []byte("earlier\n"), 0o600))
		for _, name := range []string{"new.log", "before.log"} {
			_, err := p.try(t.Context(), steps("sleep"), onDirectory, func(c *cri.ContainerConfig) { c.LogPath = name })
			if err == nil {
				t.Fatal("a file was mounted on a directory")
			}
			equalSlices(t, "logs", logs(), []string{"before.log"})
		}
		c := p.start(t, "echo hello", func(c *cri.ContainerConfig) { c.LogPath = "used.log" })
		c.wait(t)
		c.remove(t)
		equalSlices(t, "logs", logs(), []string{"before.log", "used.log"})
	}
}
