package integration

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc/codes"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/nriplugin"
)

// A class that is not in the file fails CreateContainer, with its name in the
// error; the file may change.
func TestUnknownClass(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "blockio.yaml")
	must(t, os.WriteFile(file, []byte("Classes:\n  slow: []\n"), 0o600))
	w := private(t, node.Options{Config: "runtime.blockio_config_file = \"" + file + "\"\n"})
	p := w.run(t, "runc", annotated(map[string]string{
		"blockio.resources.beta.kubernetes.io/pod":           "slow",
		"blockio.resources.beta.kubernetes.io/container.bad": "gold",
		"rdt.resources.beta.kubernetes.io/pod":               "gold", // there are no such classes at all
	}))
	p.start(t, "sleep", named("good", nil))
	_, err := p.try(t.Context(), steps("sleep"), named("bad", nil))
	wantCode(t, err, codes.InvalidArgument, `unknown block I/O class "gold"`)
	must(t, os.WriteFile(file, []byte("Classes:\n  gold: []\n"), 0o600))
	p.start(t, "sleep", named("bad", nil))
}

// NRI plugins name classes in the same way as annotations.
func TestClassByPlugin(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "blockio.yaml")
	must(t, os.WriteFile(file, []byte("Classes:\n  slow: []\n"), 0o600))
	w := private(t, node.Options{Config: "runtime.blockio_config_file = \"" + file + "\"\n"})
	w.Plugin(t, "10", &nriplugin.Plugin{Create: func(_ *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
		a := &api.ContainerAdjustment{}
		a.SetLinuxBlockIOClass(map[string]string{"good": "slow", "bad": "gold"}[c.GetName()])
		return a, nil, nil
	}})
	p := w.run(t, "runc", annotated(map[string]string{"blockio.resources.beta.kubernetes.io/container.removed": "slow"}))
	p.start(t, "sleep", named("good", nil))
	p.start(t, "sleep", named("removed", nil))
	_, err := p.try(t.Context(), steps("sleep"), named("bad", nil))
	wantCode(t, err, codes.InvalidArgument, `unknown block I/O class "gold"`)
}
