package status

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crius-run/crius/internal/background"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/view"
)

// node is a machine that answers as told.
type node struct {
	mu      sync.Mutex
	fail    map[string]error         // by question
	hang    map[string]chan struct{} // by question: until this is closed, or its context ends
	more    []string                 // handlers beside "fake"
	version uint64
}

var errInjected = errors.New("injected")

func (n *node) set(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
}

func (n *node) answer(ctx context.Context, question string) error {
	n.mu.Lock()
	hang, err := n.hang[question], n.fail[question]
	n.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return err
}

type fakeImages struct{ *node }

func (f fakeImages) Ready(ctx context.Context) error { return f.answer(ctx, "store ready") }
func (f fakeImages) CheckMapping(string) error       { return nil }

type fakeNetwork struct{ *node }

func (f fakeNetwork) Ready(ctx context.Context) error { return f.answer(ctx, "network ready") }
func (f fakeNetwork) Grace() error                    { return f.answer(context.Background(), "network grace") }

type fakeRuntimes struct{ *node }

func (f fakeRuntimes) Get(name string) (oci.Runtime, error) {
	return fakeRuntime{node: f.node, name: cmp.Or(name, "fake")}, nil
}

func (f fakeRuntimes) Bind(name string, _ oci.Origin) (oci.Runtime, error) { return f.Get(name) }

func (f fakeRuntimes) All() iter.Seq2[string, oci.Runtime] { return nil }

func (f fakeRuntimes) Names() (names []string) {
	f.set(func() { names = append(names, f.more...) })
	names = append(names, "fake")
	slices.Sort(names)
	return names
}

func (fakeRuntimes) Default() string { return "fake" }

func (f fakeRuntimes) Version() (version uint64) {
	f.set(func() { version = f.version })
	return version
}

func (f fakeRuntimes) Ready(ctx context.Context) error { return f.answer(ctx, "runtime ready") }
func (f fakeRuntimes) MonitorReady() error             { return f.answer(context.Background(), "monitor ready") }

type fakeRuntime struct {
	oci.Runtime
	node *node
	name string
}

func (f fakeRuntime) Probe(ctx context.Context) (*oci.Abilities, error) {
	return &oci.Abilities{}, f.node.answer(ctx, "probe "+f.name)
}

func (f fakeRuntime) Handler() (h oci.Handler) {
	if f.name == "pinned" {
		h.ExecCPUAffinity = oci.FirstCPU // of which nothing is among its Abilities
	}
	return h
}

// bench is a Node on a machine, by a clock of its own.
type bench struct {
	*testing.T
	node   *node
	status *Node
}

func timeless(t *testing.T, test func(t *testing.T, b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := &node{fail: map[string]error{}, hang: map[string]chan struct{}{}}
		looks := background.New(t.Context())
		t.Cleanup(func() {
			looks.End(errInjected)
			looks.Wait()
		})
		test(t, &bench{t, n, New(fakeRuntimes{n}, fakeImages{n}, fakeNetwork{n}, func() error { return n.answer(context.Background(), "cgroups") }, looks)})
	})
}

// readings are what a kubelet has been told.
func (b *bench) readings() (*view.RuntimeStatus, *view.NetworkStatus) {
	b.Helper()
	runtime, err := b.status.RuntimeStatus(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	network, err := b.status.NetworkStatus(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	return runtime, network
}

// While all is ready a status costs nothing: it is what the last look has found, as
// often as it is asked for. Looks go on beside the calls, and so what has changed is
// seen, also if a look hangs for a while.
func TestStatusIsKeptUpToDate(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		b.readings()
		synctest.Wait() // for looks that began before the first call did
		runtime, network := b.readings()
		if runtime.NotReady != nil || network.NotReady != nil || len(runtime.Handlers) != 2 {
			t.Fatalf("at first: %+v, %+v", runtime, network)
		}
		b.node.set(func() {
			b.node.fail["store ready"], b.node.fail["network ready"] = errInjected, errInjected
			b.node.more = []string{"well"}
		})
		if again, same := b.readings(); again != runtime || same != network {
			t.Error("a call looked")
		}
		if n := testing.AllocsPerRun(100, func() { b.readings() }); n > 0 {
			t.Errorf("a call allocates %v objects", n)
		}
		time.Sleep(max(runtimePeriod, networkPeriod) + time.Second)
		if runtime, network = b.readings(); !errors.Is(runtime.NotReady, errInjected) || !errors.Is(network.NotReady, errInjected) || len(runtime.Handlers) != 3 {
			t.Errorf("after a while: %+v, %+v", runtime, network)
		}

		// What was not ready and is ready now is told at once.
		b.node.set(func() { delete(b.node.fail, "store ready"); delete(b.node.fail, "network ready") })
		if runtime, network = b.readings(); runtime.NotReady != nil || network.NotReady != nil {
			t.Errorf("ready again: %v, %v", runtime.NotReady, network.NotReady)
		}

		hang := make(chan struct{})
		b.node.set(func() { b.node.hang["network ready"] = hang })
		time.Sleep(time.Minute)
		if _, same := b.readings(); same.NotReady != nil {
			t.Errorf("while a look hangs: %v", same.NotReady)
		}
		close(hang)
	})
}

// A call that comes before anything has been found waits for that; one that comes
// while the network is not ready waits for a look, but not without end.
func TestStatusWaitsForALook(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		hang := make(chan struct{}) // else a look could be over before Last looks at what it found
		b.node.set(func() { b.node.hang["store ready"], b.node.hang["network ready"] = hang, hang })
		if runtime, network := b.status.Last(); runtime != nil || network != nil {
			t.Errorf("nothing has been looked for yet: %+v, %+v", runtime, network)
		}
		close(hang)
		synctest.Wait()
		if runtime, network := b.status.Last(); runtime == nil || runtime.NotReady != nil || network == nil {
			t.Errorf("nobody has waited: %+v, %+v", runtime, network)
		}
	})
	timeless(t, func(t *testing.T, b *bench) {
		hang := make(chan struct{})
		b.node.set(func() { b.node.fail["network ready"], b.node.hang["network ready"] = errInjected, hang })
		if status, err := b.status.NetworkStatus(t.Context()); err == nil {
			t.Errorf("nothing has been found yet: %+v", status)
		}
		close(hang)
		status, err := b.status.NetworkStatus(t.Context())
		if err != nil || !errors.Is(status.NotReady, errInjected) {
			t.Errorf("got %+v, %v", status, err)
		}
		hang = make(chan struct{})
		defer close(hang)
		b.node.set(func() { b.node.hang["network ready"] = hang })
		if status, err := b.status.NetworkStatus(t.Context()); err != nil || !errors.Is(status.NotReady, errInjected) {
			t.Errorf("the look hangs: %+v, %v", status, err)
		}
	})
}

// A reload of the configuration shows in the next status.
func TestStatusAfterReload(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		b.readings()
		synctest.Wait()
		b.node.set(func() { b.node.more, b.node.version = []string{"new"}, 7 })
		runtime, _ := b.readings()
		var names []string
		for _, h := range runtime.Handlers {
			names = append(names, h.Name)
		}
		if !slices.Equal(names, []string{"", "fake", "new"}) {
			t.Errorf("handlers %q", names)
		}
	})
}

// The runtime is ready unless the store or the default handler is not.
func TestReadiness(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		if err := b.status.runtimeReady(t.Context()); err != nil {
			t.Error(err)
		}
		for _, step := range []string{"store ready", "runtime ready"} {
			b.node.fail[step] = errInjected
			if err := b.status.runtimeReady(t.Context()); !errors.Is(err, errInjected) {
				t.Errorf("%s: %v", step, err)
			}
			delete(b.node.fail, step)
		}
		b.node.fail["probe fake"] = errInjected // of any handler: whether it is the default one's the table knows
		if err := b.status.runtimeReady(t.Context()); err != nil {
			t.Error(err)
		}
		delete(b.node.fail, "probe fake")
	})
}

// A handler that cannot be used, or does not say in time what it can do, is left out,
// in an order that never changes, and the default one never.
func TestHandlersLeaveOutWhatCannotBeUsed(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		names := func() (names []string) {
			for _, h := range b.status.Handlers(t.Context()) {
				names = append(names, h.Name)
			}
			return names
		}
		b.node.set(func() { b.node.more = []string{"broken", "well"}; b.node.fail["probe broken"] = errInjected })
		if got := names(); !slices.Equal(got, []string{"", "fake", "well"}) {
			t.Errorf("one is broken: %q", got)
		}
		hang := make(chan struct{})
		b.node.set(func() { b.node.hang["probe broken"], b.node.hang["probe fake"] = hang, hang })
		if got := names(); !slices.Equal(got, []string{"", "fake", "well"}) {
			t.Errorf("two hang: %q", got)
		}
		close(hang)
		b.node.set(func() { delete(b.node.fail, "probe broken") })
		if got := names(); !slices.Equal(got, []string{"", "broken", "fake", "well"}) {
			t.Errorf("all are well: %q", got)
		}
	})
}

// A handler that makes no containers is not offered, and no pod of it is run.
func TestHandlerThatCannotServe(t *testing.T) {
	n := New(fakeRuntimes{&node{more: []string{"pinned"}}}, fakeImages{&node{}}, fakeNetwork{&node{}}, func() error { return nil }, background.New(t.Context()))
	if _, err := n.Probe(t.Context(), "pinned"); !errors.Is(err, fault.Unavailable) {
		t.Errorf("%v", err)
	}
	for _, h := range n.Handlers(t.Context()) {
		if h.Name == "pinned" {
			t.Error("the handler is offered")
		}
	}
}

// The log says once what keeps pods from running, before anybody asks, and that it is over.
func TestNotReadyIsLoggedOnce(t *testing.T) {
	var log strings.Builder
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	synctest.Test(t, func(t *testing.T) {
		m := &node{fail: map[string]error{"cgroups": errInjected}}
		looks := background.New(t.Context())
		n := New(fakeRuntimes{m}, fakeImages{m}, fakeNetwork{m}, func() error { return m.answer(context.Background(), "cgroups") }, looks)
		n.Watch()
		time.Sleep(5 * runtimePeriod)
		synctest.Wait()
		m.set(func() { m.fail = nil })
		time.Sleep(5 * runtimePeriod)
		synctest.Wait()
		looks.End(errInjected)
		looks.Wait()
	})
	said := log.String()
	if strings.Count(said, `level=WARN msg="runtime is not ready"`) != 1 || !strings.Contains(said, "injected") || strings.Count(said, `msg="runtime is ready again"`) != 1 {
		t.Error(said)
	}
}
