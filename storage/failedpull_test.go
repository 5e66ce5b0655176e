package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
)

// held keeps answers back until a channel is closed.
func held(until <-chan struct{}) registry.Action {
	return func(answer http.Handler, stop <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			select {
			case <-until:
				answer.ServeHTTP(w, req)
			case <-stop:
			case <-req.Context().Done():
			}
		})
	}
}

// pulling is a pull in the background that waits for one of its layers.
type pulling struct {
	finish context.CancelFunc // lets the layer come
	cancel context.CancelFunc
	ended  chan error
	from   *registry.Registry
}

// hold begins to pull an image whose layer i does not come, and returns when that has
// been asked for.
func (n *node) hold(name string, a *image.Artifact, i int) *pulling {
	n.t.Helper()
	r := serve(n.t, name, "1", a)
	ctx, cancel := context.WithCancel(testContext(n.t))
	until, finish := context.WithCancel(testContext(n.t))
	asked, ask := context.WithCancel(testContext(n.t))
	layer := layerDigest(a, i)
	r.Inject(registry.Fault{Path: layer, Do: func(answer http.Handler, stop <-chan struct{}) http.Handler {
		ask()
		return held(until.Done())(answer, stop)
	}})
	p := &pulling{finish: finish, cancel: cancel, ended: make(chan error, 1), from: r}
	go func() {
		_, err := n.Pull(ctx, PullRequest{Image: r.Addr() + "/" + name + ":1"})
		p.ended <- err
	}()
	<-asked.Done()
	return p
}

// repeatedBlobs are the paths of blobs that a registry was asked for more than once.
func repeatedBlobs(r *registry.Registry) (paths []string) {
	asked := map[string]bool{}
	for _, request := range r.Requests() {
		if asked[request.Path] && strings.Contains(request.Path, "/blobs/") {
			paths = append(paths, request.Path)
		}
		asked[request.Path] = true
	}
	return paths
}

// layerIDs are all layers that the store has.
func (n *node) layerIDs() (ids []string) {
	n.t.Helper()
	layers, err := n.store.Layers()
	if err != nil {
		n.t.Fatal(err)
	}
	for _, l := range layers {
		ids = append(ids, l.ID)
	}
	return ids
}

// The layers of failed pulls are deleted when they fail, however long an unrelated pull takes; a
// repair finds orphaned layers meanwhile.
func TestFailedPullsDoNotWaitForASlowOne(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	slow := n.hold("slow", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("slow", "x"))}}), 0)
	for i := range 3 {
		bad := layer(t, image.Text("bad", fmt.Sprint(i)))
		a := build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("good", fmt.Sprint(i))), bad}})
		a.Blobs[bad.Digest] = []byte("something else")
		r := serve(t, "bad", "1", a)
		if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/bad:1"}); err == nil {
			t.Fatal("pulled")
		}
		if asked := repeatedBlobs(r); len(asked) > 0 {
			t.Errorf("asked time and again for %q", asked)
		}
		if layers, jobs := n.layerIDs(), n.entries("root/crius-pulls"); len(layers) != 0 || len(jobs) != 1 {
			t.Errorf("after %d failures there are layers %q and jobs %q, want the job of the slow pull alone", i+1, layers, jobs)
		}
	}
	orphan, err := n.store.CreateLayer("", "", nil, "", false, nil)
	ok(t, err)
	n.leftovers.OrphanAge = time.Nanosecond
	if found, err := n.leftovers.Orphans(); err != nil || !slices.Equal(found, []string{orphan.ID}) {
		t.Errorf("orphans %q, %v", found, err)
	}
	ok(t, n.leftovers.DeleteOrphan(testContext(t), orphan.ID))
	slow.finish()
	ok(t, <-slow.ended)
	n.remove(n.list()[0].ID)
	n.empty()
}

// A pull that fails deletes no layer that another pull has found or brought: that pull asks for no
// layer again. Then the layers that neither image has are deleted.
func TestFailedPullLeavesLayersToOthers(t *testing.T) {
	t.Parallel()
	base, other := layer(t, image.Text("base", "x")), layer(t, image.Text("other", "y"))
	end := func(text string) image.Layer { return layer(t, image.Text("end", text)) }
	for name, test := range map[string]struct {
		failing, going []image.Layer // both wait for their last one
		failingLast    bool
		both, kept     int // layers of both, and of these after the failure
	}{
		"found":                 {failing: []image.Layer{base, other, end("1")}, going: []image.Layer{base, end("2")}, both: 2, kept: 1},
		"brought":               {failing: []image.Layer{base, other, end("1")}, going: []image.Layer{base, end("2")}, failingLast: true, both: 2, kept: 1},
		"content above another": {failing: []image.Layer{other, base, end("1")}, going: []image.Layer{base, end("2")}, both: 3, kept: 1},
		"all":                   {failing: []image.Layer{base, other, end("1")}, going: []image.Layer{base, other, end("2")}, both: 2, kept: 2},
	} {
		for _, outcome := range []string{"succeeds", "fails"} {
			t.Run(name+" and the other pull "+outcome, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				going := build(t, image.Image{Layers: test.going})
				pulls := map[bool]*pulling{}
				for _, failing := range []bool{!test.failingLast, test.failingLast} {
					a := going
					if failing {
						a = build(t, image.Image{Layers: test.failing})
					}
					pulls[failing] = n.hold("app", a, len(a.Blobs)-2) // one is the config
					n.waitLayers(len(a.Blobs) - 2)
				}
				n.waitLayers(test.both)
				fails, goes := pulls[true], pulls[false]
				fails.cancel()
				if err := <-fails.ended; !errors.Is(err, context.Canceled) {
					t.Errorf("failing pull: %v", err)
				}
				if layers := n.layerIDs(); len(layers) != test.kept {
					t.Errorf("after the failure there are layers %q, want %d", layers, test.kept)
				}
				if outcome == "fails" {
					goes.cancel()
					<-goes.ended
					n.empty()
					return
				}
				goes.finish()
				if err := <-goes.ended; err != nil {
					t.Fatalf("the other pull: %v", err)
				}
				if asked := repeatedBlobs(goes.from); len(asked) > 0 {
					t.Errorf("the other pull had to ask again for %q", asked)
				}
				if layers := n.layerIDs(); len(layers) != len(test.going) {
					t.Errorf("in the end there are layers %q, want those of the image", layers)
				}
				n.noDebris()
				n.remove(going.ID())
				n.empty()
			})
		}
	}
}

// However many failed pulls have put a content that a running one wants above others,
// they leave none of it, whether the running one has it already or not yet.
func TestFailedPullsDoNotAddUp(t *testing.T) {
	t.Parallel()
	x, last := layer(t, image.Text("x", "x")), layer(t, image.Text("slow", "x"))
	for name, c := range map[string]struct {
		layers []image.Layer // of the running pull
		held   int           // the one that it waits for
	}{
		"has it":      {[]image.Layer{x, last}, 1},
		"will get it": {[]image.Layer{last, x}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			slow := n.hold("slow", build(t, image.Image{Layers: c.layers}), c.held)
			n.waitLayers(c.held)
			for i := range 3 {
				bad := layer(t, image.Text("bad", fmt.Sprint(i)))
				a := build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("big", fmt.Sprint(i))), x, bad}})
				a.Blobs[bad.Digest] = []byte("something else")
				if _, err := n.Pull(testContext(t), PullRequest{Image: serve(t, "bad", "1", a).Addr() + "/bad:1"}); err == nil {
					t.Fatal("pulled")
				}
				if layers := n.layerIDs(); len(layers) != c.held {
					t.Errorf("after %d failures there are layers %q, want the %d of the running pull", i+1, layers, c.held)
				}
			}
			slow.finish()
			ok(t, <-slow.ended)
		})
	}
}

// The layer from which a running pull was about to copy is deleted with a failed pull, because it
// is above layers that nobody needs. The running pull then gets the content from its registry.
func TestSourceOfACopyGoes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	big, x := layer(t, image.Text("big", "y")), layer(t, image.Text("x", "x"))
	fails := n.hold("fails", build(t, image.Image{Layers: []image.Layer{big, x, layer(t, image.Text("end", "1"))}}), 2)
	n.waitLayers(2)
	going := build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("first", "z")), x}})
	goes := n.hold("goes", going, 0)
	fails.cancel()
	if err := <-fails.ended; !errors.Is(err, context.Canceled) {
		t.Errorf("failing pull: %v", err)
	}
	if layers := n.layerIDs(); len(layers) != 0 {
		t.Errorf("after the failure there are layers %q", layers)
	}
	goes.finish()
	ok(t, <-goes.ended)
	n.noDebris()
	n.remove(going.ID())
	n.empty()
}

// What many failed pulls have left to a running one is remembered by one of them, so that
// their files do not add up; a crash forgets none of it.
func TestKeptLayersAreRememberedOnce(t *testing.T) {
	t.Parallel()
	for _, crash := range []bool{false, true} {
		t.Run(fmt.Sprintf("crash %t", crash), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			ctx := testContext(t)
			var layers []image.Layer
			var wanted []digest.Digest
			for i := range 3 {
				l, err := image.NewStoredLayer(image.Text("name", fmt.Sprint(i)))
				ok(t, err)
				layers, wanted = append(layers, l), append(wanted, l.DiffID)
			}
			begin := func(digests []digest.Digest) *durable.Job {
				job, err := beginPull(ctx, n.leftovers, "", "", durable.Needs{Digests: digests})
				ok(t, err)
				return job
			}
			first, running, second, third := begin(nil), begin(wanted), begin(nil), begin(nil)
			for _, l := range layers {
				_, _, err := n.store.PutLayer(l.DiffID.Encoded(), "", nil, "", false, &cstorage.LayerOptions{UncompressedDigest: l.DiffID}, bytes.NewReader(l.Blob))
				ok(t, err)
			}
			_, err := n.store.CreateLayer("", "", nil, "", false, nil) // not wanted
			ok(t, err)
			for _, failed := range []*durable.Job{third, first, second} {
				failed.End(ctx, false)
			}
			if jobs, layers := n.entries("root/crius-pulls"), n.layerIDs(); len(jobs) != 2 || len(layers) != len(wanted) {
				t.Errorf("there are jobs %q and layers %q, want the running job, one that failed, and the layers that are wanted", jobs, layers)
			}
			if crash {
				running.Lock.Close() // as the kernel does when the process dies
				n.restart()
			} else {
				running.End(ctx, true)
			}
			n.empty()
		})
	}
}
