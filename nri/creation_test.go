package nri

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/nriplugin"
	"github.com/crius-run/crius/test/kit/wait"
)

// creating asks the plugins about a container whose creation takes the runtime
// longer than new plugins wait.
func creating(t *testing.T, p *Plugins) (*Container, *ContainerEvents) {
	t.Helper()
	p.CreationTime = time.Millisecond
	c := aContainer(aPod("p"), "c")
	events := &ContainerEvents{Plugins: p, Describe: func() *Container { return c }}
	if _, err := events.Create(t.Context(), events.Describe); err != nil {
		t.Fatal(err)
	}
	return c, events
}

// A hung creation delays neither a plugin nor the verbs of other pods. Its
// container, about which the plugin was not asked, is refused when the runtime
// has created it at last.
func TestHungCreationIsRefusedAfterSynchronization(t *testing.T) {
	t.Parallel()
	p, cfg := start(t, &fakeNode{}, nil)
	_, events := creating(t, p)
	plugin := &nriplugin.Plugin{}
	connect(t, p, cfg, "10", plugin)
	p.StopPod(t.Context(), func() *Pod { return aPod("other") })
	if err := events.Confirm(); !errors.Is(err, fault.Unavailable) {
		t.Errorf("the creation: %v, want %v", err, fault.Unavailable)
	}
	events.Undone(t.Context())
	if got, want := plugin.Names(""), []string{"StopPodSandbox", "StopContainer", "RemoveContainer"}; !slices.Equal(got, want) {
		t.Errorf("told %q, want %q", got, want)
	}
	connect(t, p, cfg, "20", &nriplugin.Plugin{}) // nothing is held
}

// A hung creation that fails releases its hold, whether that has lapsed or not.
func TestHungCreationThatFails(t *testing.T) {
	t.Parallel()
	p, cfg := start(t, &fakeNode{}, nil)
	_, events := creating(t, p)
	<-events.creation.lapsed
	events.Undone(t.Context())
	connect(t, p, cfg, "10", &nriplugin.Plugin{})
}

// A slow creation succeeds unless a plugin has connected meanwhile; a plugin
// that fails to synchronize does not count. After the confirmation new plugins
// wait for the creation again, and so know the container. The test is not
// parallel: it looks for the library's waiting goroutine.
func TestSlowCreationSucceeds(t *testing.T) {
	node := &fakeNode{}
	p, cfg := start(t, node, nil)
	c, events := creating(t, p)
	<-events.creation.lapsed
	failed := errors.New("a test")
	err := p.synchronize(t.Context(), func(context.Context, []*api.PodSandbox, []*api.Container) ([]*api.ContainerUpdate, error) {
		return nil, failed
	})
	if !errors.Is(err, failed) {
		t.Fatal(err)
	}
	node.listed.Store(false)
	if err := events.Confirm(); err != nil {
		t.Fatal(err)
	}
	plugin := connectDuringCreation(t, node, cfg)
	node.addContainer(c)
	events.Created(t.Context())
	wait.For(t, "the plugin to be connected", func() bool { return p.active.Load() == 1 })
	if n := plugin.Introduced(c.ID); n != 1 {
		t.Errorf("the plugin was told %d times that the container is there", n)
	}
}
