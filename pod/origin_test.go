package pod

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"sync/atomic"
	"testing"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/status"
)

// A pod from before the origin was recorded gets it when the server is started, so that later
// changes of the handler do not concern it.
func TestOriginOfAPodOfAnEarlierVersion(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	made := e.sandboxes.All()[0].record()
	if made.Origin == nil {
		t.Fatal("the origin of a new pod is not recorded")
	}
	b.close(e)
	earlier := made
	earlier.Origin = nil
	if err := e.records.Pods.Put(t.Context(), pod, &earlier); err != nil {
		t.Fatal(err)
	}
	e = b.engine()
	if rec, err := e.records.Pods.Get(pod); err != nil || !reflect.DeepEqual(rec.Origin, made.Origin) {
		t.Errorf("on record: %+v, %v; want %+v", rec.Origin, err, made.Origin)
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// If the root of the handler is another one since, the origin has the root where the runtime's state
// is. If it cannot be found, nothing is recorded, so that the operator can set the root back.
func TestOriginHasTheRootOfTheState(t *testing.T) {
	for name, byDefault := range map[string]bool{"default": true, "another": false} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			e := b.engine()
			pod := b.run(e, "a")
			ctr := b.start(e, pod, "c")
			b.close(e)
			earlier := e.sandboxes.All()[0].record()
			earlier.Origin = nil
			if err := e.records.Pods.Put(t.Context(), pod, &earlier); err != nil {
				t.Fatal(err)
			}
			former := oci.DefaultRoot(b.cfg.RunDir, "fake")
			if byDefault {
				if err := os.MkdirAll(filepath.Join(former, ctr), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			e = b.engine()
			rec, err := e.records.Pods.Get(pod)
			if err != nil || (rec.Origin != nil) != byDefault || byDefault && rec.Origin.Handler.Root != former {
				t.Errorf("on record: %+v, %v", rec.Origin, err)
			}
			if err := os.RemoveAll(former); err != nil {
				t.Error(err)
			}
			b.remove(e, pod)
			b.nothingLeft()
		})
	}
}

// reloading has another handler configured each time it is asked.
type reloading struct {
	fakeRuntimes
	asked *atomic.Int32
}

func (r reloading) Get(string) (oci.Runtime, error) {
	return numbered{fakeRuntime(r.fakeRuntimes), fmt.Sprintf("runtime-%d", r.asked.Add(1))}, nil
}

type numbered struct {
	fakeRuntime
	name string
}

func (n numbered) Handler() oci.Handler {
	return oci.Handler{Root: n.root, Options: []string{n.name}}
}

func (n numbered) Probe(context.Context) (*oci.Abilities, error) {
	return &oci.Abilities{Path: "/" + n.name}, nil
}

// A reload while a pod is made does not give it an origin of two configurations.
func TestOriginIsOfOneConfiguration(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	runtimes := reloading{fakeRuntimes{b.node}, new(atomic.Int32)}
	e.deps.Runtimes = runtimes
	e.status = status.New(runtimes, e.deps.Images, e.deps.Network, func() error { return nil }, e.background)
	b.run(e, "a")
	if h := e.sandboxes.All()[0].record().Origin.Handler; len(h.Options) != 1 || h.Path != "/"+h.Options[0] {
		t.Errorf("path %s, options %q", h.Path, h.Options)
	}
	b.removeAll(e)
}
