package pod

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/test/kit/nriplugin"
	"github.com/crius-run/crius/test/kit/wait"
)

// An update continues although its caller leaves, even while plugins are asked: plugins that
// were asked rely on it.
func TestUpdateWhoseCallerLeavesWhilePluginsAreAsked(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	var leave context.CancelFunc
	plugin := &nriplugin.Plugin{Answer: func(event nriplugin.Event) error {
		if event.Name == "UpdateContainer" || event.Name == "UpdatePodSandbox" {
			leave()
		}
		return nil
	}}
	connect(t, e, plugin)

	pod := b.run(e, "a")
	ctr := b.start(e, pod, "c")
	limits := &cri.LinuxContainerResources{CpuShares: 512}
	for _, update := range []func(context.Context) error{
		func(ctx context.Context) error { return e.UpdateContainerResources(ctx, ctr, limits) },
		func(ctx context.Context) error { return e.UpdateSandboxResources(ctx, pod, nil, limits) },
	} {
		ctx, cancel := context.WithCancel(context.Background())
		leave = cancel
		if err := update(ctx); err != nil {
			t.Error(err)
		}
		cancel()
	}
	if told := plugin.Names(""); !slices.Contains(told, "PostUpdateContainer") || !slices.Contains(told, "PostUpdatePodSandbox") {
		t.Errorf("the plugin was told %q", told)
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// A creation that hangs while a plugin connects fails alone: verbs of other pods continue, and
// the container, which the plugin was not asked about, is undone once the runtime has made it.
// The kubelet's retry succeeds.
func TestPluginConnectsWhileACreationHangs(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	first, second := &nriplugin.Plugin{}, &nriplugin.Plugin{}
	socket := connect(t, e, first)
	e.deps.Plugins.CreationTime = time.Millisecond
	pod, other := b.run(e, "a"), b.run(e, "b")
	hang := make(chan struct{})
	b.node.set(func() { b.node.block["create"] = hang })
	created := make(chan error, 1)
	go func() {
		_, err := e.CreateContainer(t.Context(), pod, containerConfig("c"), nil)
		created <- err
	}()
	b.awaitCalls("create", 1)
	if err := second.Connect(t.Context(), socket, "20", "test"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(second.Close)
	wait.For(t, "the second plugin to be connected", func() bool { return e.deps.Plugins.Report().Connected == 2 })
	b.remove(e, other)
	b.node.set(func() { delete(b.node.block, "create") })
	close(hang)
	if err := <-created; !errors.Is(err, fault.Unavailable) {
		t.Errorf("the creation that hung: %v", err)
	}
	if id := b.create(e, pod, "c"); !second.Knows(id) {
		t.Error("the second plugin does not know the container")
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// connect connects a plugin with the engine, and returns the socket for others.
func connect(t *testing.T, e *Engine, plugin *nriplugin.Plugin) (socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "nri") // whose path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	cfg := nri.DefaultConfig()
	cfg.Socket, cfg.PluginDir, cfg.PluginConfigDir = filepath.Join(dir, "s"), filepath.Join(dir, "plugins"), filepath.Join(dir, "conf")
	cfg.RegistrationTimeout, cfg.RequestTimeout = wait.Limit, wait.Limit
	if e.deps.Plugins, err = nri.New(cfg, "1.2.3"); err != nil {
		t.Fatal(err)
	}
	if err := e.deps.Plugins.Start(t.Context(), PluginNode{e}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.deps.Plugins.Close(context.Background()) })
	if err := plugin.Connect(t.Context(), cfg.Socket, "10", "test"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(plugin.Close)
	wait.For(t, "the plugin to be connected", func() bool { return e.deps.Plugins.Report().Connected == 1 })
	return cfg.Socket
}

// A plugin that connects after the others have been told that a pod is removed does not see the
// pod: it would never learn of the removal.
func TestPluginsHearOfNoPodThatIsRemoved(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	listed := make(chan int, 2)
	plugin := &nriplugin.Plugin{Answer: func(event nriplugin.Event) error {
		if event.Name == "StopPodSandbox" || event.Name == "RemovePodSandbox" {
			listed <- len(PluginNode{e}.Pods())
		}
		return nil
	}}
	connect(t, e, plugin)
	pod := b.run(e, "a")
	b.remove(e, pod)
	if stop, removal := <-listed, <-listed; stop != 1 || removal != 0 {
		t.Errorf("a new plugin would be told of %d pods at the stop and of %d at the removal", stop, removal)
	}
	b.nothingLeft()
}
