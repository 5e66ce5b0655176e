package integration

import (
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/node"
)

// impatient is a node with a time-out for plugins that a test can wait for, but
// far beyond what they take on a busy machine.
func impatient() node.Options { return node.Options{Config: "[network]\ntimeout = \"15s\"\n"} }

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
			if took := time.Since(began); took > endless {
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
			if took := time.Since(began); took > endless {
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
	w := private(t, node.Options{})
	plugin := w.cni(t)
	other := w.run(t, "runc")
	c := other.start(t, "sleep")
	plugin.does(t, "ADD", "once slow 25s")
	slow := make(chan error, 1)
	config := w.podConfig(t)
	var over atomic.Bool
	go func() {
		resp, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config})
		over.Store(true)
		if err == nil {
			_, err = w.Runtime().RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: resp.PodSandboxId})
		}
		slow <- err
	}()
	if !eventually(func() bool { _, err := os.Stat(w.Path("cni", "bin", "faults", "ADD")); return os.IsNotExist(err) }) {
		t.Fatal("the plugin was never called")
	}
	w.statusOf(t)
	c.status(t)
	if _, err := w.Runtime().ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{}); err != nil {
		t.Error(err)
	}
	c.exec(t, "echo still-here")
	quick := w.run(t, "runc")
	quick.finish(t, "echo runs")
	if over.Load() {
		t.Error("the others had to wait for the slow pod")
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
