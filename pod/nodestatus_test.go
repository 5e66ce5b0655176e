package pod

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crius-run/crius/pod/view"
)

// readings are what a kubelet has been told.
func (b *bench) readings(e *Engine) (*view.RuntimeStatus, *view.NetworkStatus) {
	b.Helper()
	runtime, err := e.RuntimeStatus(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	network, err := e.NetworkStatus(b.Context())
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
		e := b.engine()
		b.readings(e)
		synctest.Wait() // for looks that began before the first call did
		runtime, network := b.readings(e)
		if runtime.NotReady != nil || network.NotReady != nil || len(runtime.Handlers) != 2 {
			t.Fatalf("at first: %+v, %+v", runtime, network)
		}
		b.node.set(func() {
			b.node.fail["store ready"], b.node.fail["network ready"] = errInjected, errInjected
			b.node.more = []string{"well"}
		})
		if again, same := b.readings(e); again != runtime || same != network {
			t.Error("a call looked")
		}
		if n := testing.AllocsPerRun(100, func() { b.readings(e) }); n > 0 {
			t.Errorf("a call allocates %v objects", n)
		}
		time.Sleep(max(runtimePeriod, networkPeriod) + time.Second)
		if runtime, network = b.readings(e); !errors.Is(runtime.NotReady, errInjected) || !errors.Is(network.NotReady, errInjected) || len(runtime.Handlers) != 3 {
			t.Errorf("after a while: %+v, %+v", runtime, network)
		}

		// What was not ready and is ready now is told at once.
		b.node.set(func() { delete(b.node.fail, "store ready"); delete(b.node.fail, "network ready") })
		if runtime, network = b.readings(e); runtime.NotReady != nil || network.NotReady != nil {
			t.Errorf("ready again: %v, %v", runtime.NotReady, network.NotReady)
		}

		hang := make(chan struct{})
		b.node.set(func() { b.node.block["network ready"] = hang })
		time.Sleep(time.Minute)
		if _, same := b.readings(e); same.NotReady != nil {
			t.Errorf("while a look hangs: %v", same.NotReady)
		}
		close(hang)
	})
}

// A call that comes before anything has been found waits for that; one that comes
// while the network is not ready waits for a look, but not without end.
func TestStatusWaitsForALook(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		hang := make(chan struct{})
		b.node.set(func() { b.node.fail["network ready"], b.node.block["network ready"] = errInjected, hang })
		if status, err := e.NetworkStatus(t.Context()); err == nil {
			t.Errorf("nothing has been found yet: %+v", status)
		}
		close(hang)
		status, err := e.NetworkStatus(t.Context())
		if err != nil || !errors.Is(status.NotReady, errInjected) {
			t.Errorf("got %+v, %v", status, err)
		}
		hang = make(chan struct{})
		defer close(hang)
		b.node.set(func() { b.node.block["network ready"] = hang })
		if status, err := e.NetworkStatus(t.Context()); err != nil || !errors.Is(status.NotReady, errInjected) {
			t.Errorf("the look hangs: %+v, %v", status, err)
		}
	})
}

// A reload of the configuration shows in the next status.
func TestStatusAfterReload(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		b.readings(e)
		synctest.Wait()
		b.node.set(func() { b.node.more, b.node.version = []string{"new"}, 7 })
		runtime, _ := b.readings(e)
		var names []string
		for _, h := range runtime.Handlers {
			names = append(names, h.Name)
		}
		if !slices.Equal(names, []string{"", "fake", "new"}) {
			t.Errorf("handlers %q", names)
		}
	})
}
