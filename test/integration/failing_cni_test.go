package integration

import (
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/node"
)

func impatient() node.Options { return node.Options{Config: "[network]\ntimeout = \"5s\"\n"} }

func TestNameIsFreeAfterATimeout_crio_7010(t *testing.T) {
	t.Parallel()
	w := spotless(t, impatient())
	plugin := w.cni(t)
	cases := map[string]string{ // what the plugin does: what the message must say
		"fail no address left": "no address left",
		"after too late":       "too late", // the address is taken already
		"garbage":              "",
		"die":                  "",
		"hang":                 "",
		"hangafter":            "",
	}
	for words, text := range cases {
		t.Run(words, func(t *testing.T) {
			plugin.does(t, "ADD", words)
			began := time.Now()
			config := w.podConfig(t)
			_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config})
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("RunPodSandbox: %v, want an error that says %q", err, text)
			}
			if took := time.Since(began); took > 25*time.Second {
				t.Errorf("took %v", took)
			}
			plugin.heal(t)
			if err := w.Clean(t.Context(), w.empty, patience); err != nil {
				t.Error(err)
			}
			// The name is free again at once.
			p := &pod{w: w, config: config}
			resp, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config})
			if err != nil {
				t.Fatalf("the retry: %v", err)
			}
			p.id, p.made = resp.PodSandboxId, []string{resp.PodSandboxId}
			p.finish(t, "echo runs")
			p.vanish(t)
		})
	}
	if err := w.Clean(t.Context(), w.empty, patience); err != nil {
		t.Error(err)
	}
}

// A network that cannot be taken down now must not keep containers alive, nor
// be forgotten.
func TestFailedNetworkTeardownIsADebt_containerd_12926(t *testing.T) {
	t.Parallel()
	w := spotless(t, impatient())
	plugin := w.cni(t)
	for _, words := range []string{"fail not today", "hang", "die", "after too late", "at 1 die"} {
		t.Run(words, func(t *testing.T) {
			config := w.podConfig(t)
			resp, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config})
			if err != nil {
				t.Fatal(err)
			}
			p := &pod{w: w, id: resp.PodSandboxId, config: config, made: []string{resp.PodSandboxId}}
			c := p.start(t, "sleep")
			plugin.does(t, "DEL", words)
			began := time.Now()
			w.Runtime().StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: p.id}) // may say that it's not all done
			if took := time.Since(began); took > 25*time.Second {
				t.Errorf("StopPodSandbox took %v", took)
			}
			if left := w.processesOf(t, c.id); len(left) > 0 {
				t.Errorf("processes %v live on because the network cannot be removed", left)
			}
			w.Runtime().RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: p.id})
			if err := w.Crash(t.Context()); err != nil { // a debt survives the server
				t.Fatal(err)
			}
			plugin.heal(t)
			p.vanish(t)
		})
	}
	if err := w.Clean(t.Context(), w.empty, patience); err != nil {
		t.Error(err)
	}
	for id := range plugin.calls(t, "ADD", "done") {
		if n := plugin.calls(t, "DEL", "done")[id]; n < 1 {
			t.Errorf("pod %s has %d successful DELs", id, n)
		}
	}
}

// DEL uses what was recorded at ADD: the configuration may be gone by then.
func TestPodsGoAwayWithoutTheirConfiguration(t *testing.T) {
	t.Parallel()
	w := private(t, impatient())
	p := w.run(t, "runc")
	p.start(t, "sleep")
	if err := os.Rename(w.Path("cni", "net.d"), w.Path("cni", "aside")); err != nil {
		t.Fatal(err)
	}
	if err := w.Crash(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.vanish(t)
}

// One hung plugin delays its own pod only.
func TestAHungPluginDelaysNobodyElse(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[network]\ntimeout = \"30s\"\n"})
	plugin := w.cni(t)
	other := w.run(t, "runc")
	c := other.start(t, "sleep")
	plugin.does(t, "ADD", "once slow 8s")
	slow := make(chan error, 1)
	config := w.podConfig(t)
	go func() {
		resp, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config})
		if err == nil {
			_, err = w.Runtime().RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: resp.PodSandboxId})
		}
		slow <- err
	}()
	if !eventually(func() bool { _, err := os.Stat(w.Path("cni", "bin", "faults", "ADD")); return os.IsNotExist(err) }) {
		t.Fatal("the plugin was never called")
	}
	began := time.Now()
	w.statusOf(t)
	c.status(t)
	if _, err := w.Runtime().ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{}); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("Status, ContainerStatus and ListPodSandbox took %v", took)
	}
	c.exec(t, "echo still-here")
	quick := w.run(t, "runc")
	quick.finish(t, "echo runs")
	if took := time.Since(began); took > 7*time.Second {
		t.Errorf("another pod needed %v beside the slow one", took)
	}
	if err := <-slow; err != nil {
		t.Errorf("the slow pod: %v", err)
	}
}

func TestACallerThatGivesUpFindsItsPodLater_crio_8906(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	plugin := w.cni(t)
	plugin.does(t, "ADD", "slow 1s")
	config := w.podConfig(t)
	request := &cri.RunPodSandboxRequest{Config: config}
	var id string
	if !eventually(func() bool {
		ctx, cancel := timeout(t, 300*time.Millisecond)
		defer cancel()
		resp, err := w.Runtime().RunPodSandbox(ctx, request)
		if err != nil {
			wantCode(t, err, codes.DeadlineExceeded)
			return false
		}
		id = resp.PodSandboxId
		return true
	}) {
		t.Fatal("no retry ever got the pod")
	}
	list, err := w.Runtime().ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Items) != 1 || list.Items[0].Id != id {
		t.Errorf("there are pods %v, want the one that the retry got, %s", list.Items, id)
	}
	equal(t, "number of network set-ups", len(plugin.calls(t, "ADD", "done")), 1)
	(&pod{w: w, id: id, config: config, made: []string{id}}).vanish(t)
	if err := w.Clean(t.Context(), w.empty, patience); err != nil {
		t.Error(err)
	}
}
