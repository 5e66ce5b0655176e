package scene

import (
	"encoding/json"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/nriplugin"
)

// Plugin connects an NRI plugin, and returns once the node has synchronized it.
func (w *World) Plugin(t *testing.T, index string, p *nriplugin.Plugin) *nriplugin.Plugin {
	t.Helper()
	if err := p.Connect(t.Context(), w.Path("nri.sock"), index, "p"+index); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	Receive(t, "the plugin to be told of all there is", p.Synced())
	return p
}

// InStep counts the operations in progress that are at a step.
func (w *World) InStep(t *testing.T, step string) int {
	t.Helper()
	resp, err := w.Runtime().Status(t.Context(), &cri.StatusRequest{Verbose: true})
	if err != nil {
		t.Fatalf("Status: %v", err)
	}
	var server struct{ Work []struct{ Step string } }
	if err := json.Unmarshal([]byte(resp.Info["server"]), &server); err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, work := range server.Work {
		if work.Step == step {
			n++
		}
	}
	return n
}
