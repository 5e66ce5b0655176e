package integration

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// hasty restarts the server with a plugin time-out short enough for a test, or
// without it: on a busy machine a working plugin may reach it.
func (w *world) hasty(t *testing.T, on bool) {
	t.Helper()
	text := ""
	if on {
		text = "[network]\ntimeout = \"2s\"\n"
	}
	must(t, w.Configure("20-hasty", text))
	must(t, w.Crash(t.Context()))
}

// A pod whose network cannot be made leaves nothing, and its name is free again
// at once.
func TestNameIsFreeAfterATimeout_crio_7010(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	plugin := w.cni(t)
	for words, text := range map[string]string{ // what the plugin does: what the message must contain
		"after too late": "too late", // the address is already reserved
		"garbage":        "",
		"hangafter":      "",
	} {
		t.Run(words, func(t *testing.T) {
			hangs := strings.HasPrefix(words, "hang")
			if hangs {
				w.hasty(t, true)
			}
			plugin.does(t, "ADD", words)
			config := w.podConfig(t)
			_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config})
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("RunPodSandbox: %v, want an error that says %q", err, text)
			}
			plugin.heal(t)
			if hangs {
				w.hasty(t, false)
			}
			w.Restored(t, w.empty)
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
	w.Restored(t, w.empty)
}

// A network that cannot be torn down now must neither keep containers alive nor
// be forgotten.
func TestFailedNetworkTeardownIsRetried_containerd_12926(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	plugin := w.cni(t)
	for _, words := range []string{"after too late", "hang", "at 1 die"} {
		t.Run(words, func(t *testing.T) {
			p := w.run(t, "crun")
			c := p.start(t, "sleep")
			if words == "hang" {
				w.hasty(t, true)
			}
			plugin.does(t, "DEL", words)
			w.Runtime().StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: p.id}) // may report that the teardown is incomplete
			if left := w.processesOf(t, c.id); len(left) > 0 {
				t.Errorf("processes %v live on because the network cannot be removed", left)
			}
			w.Runtime().RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: p.id})
			plugin.heal(t)
			if words == "hang" {
				w.hasty(t, false)
			} else {
				must(t, w.Crash(t.Context())) // a pending cleanup survives the server
			}
			p.vanish(t)
		})
	}
	w.Restored(t, w.empty)
	for id := range plugin.calls(t, "ADD", "done") {
		if n := plugin.calls(t, "DEL", "done")[id]; n < 1 {
			t.Errorf("pod %s has %d successful DELs", id, n)
		}
	}
}

// A hung plugin delays only its own pod.
func TestAHungPluginDelaysNobodyElse(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	plugin := w.cni(t)
	c := w.run(t, "crun").start(t, "sleep")
	plugin.does(t, "ADD", "once hang")
	config := w.podConfig(t)
	var over atomic.Bool
	hung := make(chan error, 1)
	go func() {
		_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config})
		over.Store(true)
		hung <- err
	}()
	wait.For(t, "the plugin to be called", func() bool { return len(plugin.calls(t, "ADD", "hangs")) > 0 })
	w.statusOf(t)
	c.status(t)
	if _, err := w.Runtime().ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{}); err != nil {
		t.Error(err)
	}
	c.exec(t, "echo still-here")
	w.run(t, "crun").finish(t, "echo runs")
	if over.Load() {
		t.Error("the others had to wait for the hung pod")
	}
	plugin.kill(t)
	if err := <-hung; err == nil {
		t.Error("a pod runs whose plugin was killed")
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
	wait.For(t, "a retry to get the pod", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		resp, err := w.Runtime().RunPodSandbox(ctx, request)
		if err != nil {
			wantCode(t, err, codes.DeadlineExceeded)
			return false
		}
		id = resp.PodSandboxId
		return true
	})
	list, err := w.Runtime().ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Items) != 1 || list.Items[0].Id != id {
		t.Errorf("there are pods %v, want the one that the retry got, %s", list.Items, id)
	}
	equal(t, "number of network set-ups", len(plugin.calls(t, "ADD", "done")), 1)
	(&pod{w: w, id: id, config: config, made: []string{id}}).vanish(t)
	w.Restored(t, w.empty)
}
