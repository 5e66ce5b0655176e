// Package integration tests crius's promises from outside: a real server, the
// real runc and crun, real kernel objects, and only CRI as the interface. Each
// file tests one promise and is named after it.
//
// Most tests share one node and remove their pods at their end; a test fails
// for anything that it leaves behind. Tests that kill, restart or reconfigure
// the server have their own node.
package integration

import (
	"context"
	"flag"
	"os"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/odd"
	"github.com/crius-run/crius/test/scene"
)

// probe is the image of nearly every container; see test/images/probe.
const probe = images.Probe

// handlers are the runtimes for which every promise is tested. A promise in
// which they play no part is tested only with crun, which is faster.
var handlers = scene.Handlers

// world is a node whose registry has the probe's image.
type world struct {
	*scene.World
	empty *inventory.Snapshot // without any pod; see settle
}

// commons is the node that tests share. It has no criu, even if the machine has.
var commons = scene.Commons{Prepare: func(context.Context) (node.Options, error) {
	return node.Options{Config: "[runtime]\ncriu = \"\"\n"}, nil
}}

func TestMain(m *testing.M) {
	odd.Main()
	// A test mostly waits, so more run at once than there are CPUs.
	flag.Set("test.parallel", "6")
	os.Exit(scene.Run(m, &commons, &modern, &dumping))
}

// shared returns the node that tests share. They must not restart or
// reconfigure it, and must find only their own pods in its lists.
func shared(t *testing.T) *world {
	t.Helper()
	return known(commons.World(t))
}

// spotless is a private node that records what it contains without any pod, for
// tests that check that nothing is left at the end.
func spotless(t *testing.T, o node.Options) *world {
	t.Helper()
	return known(scene.Spotless(t, o))
}

// private starts a node of the test's own.
func private(t *testing.T, o node.Options) *world {
	t.Helper()
	return known(scene.Private(t, o))
}

func known(w *scene.World) *world { return &world{World: w, empty: w.Empty} }

// settle takes stock once each of the handlers has run a container.
func (w *world) settle(ctx context.Context, handlers ...string) error {
	err := w.Settle(ctx, handlers...)
	w.empty = w.Empty
	return err
}

func (w *world) image(t *testing.T, change func(*imagespec.ImageConfig), files ...image.File) string {
	t.Helper()
	return w.Image(t, change, files...)
}

func (w *world) pull(t *testing.T, ref string) (id string) {
	t.Helper()
	return w.Pull(t, ref)
}

func (w *world) dir(t *testing.T) string {
	t.Helper()
	return w.Dir(t)
}

// each runs a test once per handler.
func each(t *testing.T, test func(t *testing.T, handler string)) {
	t.Helper()
	for _, h := range handlers {
		t.Run(h, func(t *testing.T) { test(t, h) })
	}
}
