package integration

import (
	"os"
	"path/filepath"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
)

// A container's process that claims to be a monitor does not count as one:
// crius check reads no file that it names, kills nothing in its name, and finds
// what it tries to hide.
func TestProcessPosesAsMonitor(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]string{
		"sparse file of 10 TiB": "sparse /tmp/config.json 10995116277760",
		"sparse file of 2 GiB":  "sparse /tmp/config.json 2147483648",
		"named pipe":            "fifo /tmp/config.json",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := private(t, node.Options{})
			server, hidden, claimed := w.PID(), randomID(), randomID()
			dir := filepath.Join(w.StateRoot(), "pods", hidden)
			must(t, os.MkdirAll(filepath.Join(dir, "cni"), 0o700))

			p := w.run(t, "runc")
			unprivileged := func(c *cri.ContainerConfig) {
				c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1001}
			}
			abroad := p.start(t, config+" ; pose crius-conmon --id="+hidden+" --dir={upper}/tmp --pid-file=/pid --exit-file=/exit -- runc", unprivileged)
			abroad.says(t, "ready")
			athome := p.start(t, "pose crius-conmon --id="+claimed+" --dir="+w.RunRoot()+"/containers/"+claimed+" --pid-file=/pid --exit-file=/exit -- runc", unprivileged)
			athome.says(t, "ready")

			for _, repair := range []string{"--repair=false", "--repair"} {
				found := w.check(t, repair)
				if len(found) != 1 || !found.says("orphan "+hidden, "directory "+dir) {
					t.Errorf("%s: %+v, want the directory %s alone", repair, found, dir)
				}
			}
			w.silent(t, "afterwards")
			equal(t, "the server", w.PID(), server)
			for _, c := range []*container{abroad, athome} {
				equal(t, "state of the container", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
			}
		})
	}
}
