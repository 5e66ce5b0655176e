// Package integration holds crius's promises, tested from outside: a real
// server, the real runc and crun, real kernel objects, and nothing but CRI to
// talk to it. One promise a file, and the file is named after it.
//
// Most tests share one node and remove their pods at their end; what any of
// them leaves behind fails it. Tests that kill, restart or reconfigure the
// server have a node of their own.
package integration

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/image"
	"github.com/crius-run/crius/internal/testkit/inventory"
	"github.com/crius-run/crius/internal/testkit/kubelet"
	"github.com/crius-run/crius/internal/testkit/node"
	"github.com/crius-run/crius/test/images"
)

// probe is the image that nearly every container runs; see test/images/probe.
const probe = images.Probe

// patience is how long the kernel, a monitor and the server together may take
// for something that is promised to happen soon.
const patience = 20 * time.Second

// handlers are the runtimes that every promise holds for.
var handlers = []string{"runc", "crun"}

// world is a node whose registry has the probe's image.
type world struct {
	*node.Node
	empty *inventory.Snapshot // without any pod; see settle
}

// commons is the node that tests share.
var commons struct {
	once  sync.Once
	world *world
	err   error
}

func TestMain(m *testing.M) {
	if err := node.Sweep(); err != nil {
		fmt.Fprintln(os.Stderr, "sweep:", err)
	}
	// Much of a test's time is waiting, so more run at once than there are CPUs.
	flag.Set("test.parallel", "6")
	code := m.Run()
	if w := commons.world; w != nil {
		if err := w.farewell(); err != nil {
			fmt.Fprintln(os.Stderr, "FAIL: the shared node at its end:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// farewell checks what no single test can: that all of them together left the
// node as it was.
func (w *world) farewell() error {
	defer w.Close()
	if err := w.Clean(context.Background(), w.empty, patience); err != nil {
		return err
	}
	if err := w.Stop(); err != nil {
		return fmt.Errorf("SIGTERM: %w\n%s", err, w.LogTail(20))
	}
	if faults := w.Faults(); len(faults) > 0 {
		return fmt.Errorf("the server's log has %d faults; the first:\n%s", len(faults), faults[0])
	}
	return nil
}

// shared is the node that tests share. They must not restart or reconfigure
// it, and must find only their own pods in its lists.
func shared(t *testing.T) *world {
	t.Helper()
	commons.once.Do(func() {
		ctx := context.Background()
		commons.world, commons.err = newWorld(ctx, node.Options{})
		if commons.err == nil {
			commons.err = commons.world.settle(ctx, handlers...)
		}
		if commons.err != nil {
			fmt.Fprintln(os.Stderr, "the shared node:", commons.err)
		}
	})
	if commons.err != nil {
		t.Fatalf("the shared node: %.300v", commons.err)
	}
	return commons.world
}

// spotless is a private node that knows what it has without any pod, for tests
// that check that nothing is left at the end.
func spotless(t *testing.T, o node.Options) *world {
	t.Helper()
	w := private(t, o)
	if err := w.settle(t.Context(), handlers...); err != nil {
		t.Fatal(err)
	}
	return w
}

// private is a node of the test's own, running.
func private(t *testing.T, o node.Options) *world {
	t.Helper()
	w, err := newWorld(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("end of the server's log:\n%s", w.LogTail(60))
		}
		if faults := w.Faults(); len(faults) > 0 {
			t.Errorf("the server's log has %d faults; the first:\n%s", len(faults), faults[0])
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

func newWorld(ctx context.Context, o node.Options) (*world, error) {
	o.Race = raceEnabled()
	n, err := node.New(ctx, o)
	if err != nil {
		return nil, err
	}
	w := &world{Node: n}
	if err := w.open(ctx); err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

func (w *world) open(ctx context.Context) error {
	built, err := images.Build(nil)
	if err != nil {
		return err
	}
	w.Registry.Push("probe", "latest", built)
	if err := w.Start(ctx); err != nil {
		return err
	}
	if _, err := w.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: probe}}); err != nil {
		return fmt.Errorf("pull %s: %w\n%s", probe, err, w.LogTail(20))
	}
	return nil
}

// settle runs one container per handler and only then takes stock, so that
// directories that are made at first use do not look like leaks.
func (w *world) settle(ctx context.Context, handlers ...string) error {
	if err := w.warmUp(ctx, handlers); err != nil {
		return fmt.Errorf("first pod: %w\n%s", err, w.LogTail(20))
	}
	var err error
	w.empty, err = w.Inventory()
	return err
}

func (w *world) warmUp(ctx context.Context, handlers []string) error {
	for _, h := range handlers {
		config := kubelet.Pod("first", kubelet.LogsBelow(w.Path("logs")))
		pod, err := w.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: h})
		if err != nil {
			return err
		}
		c, err := w.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{
			PodSandboxId: pod.PodSandboxId, SandboxConfig: config,
			Config: kubelet.Container("first", probe, []string{"sleep"}),
		})
		if err != nil {
			return err
		}
		if _, err := w.Runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.ContainerId}); err != nil {
			return err
		}
		if _, err := w.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod.PodSandboxId}); err != nil {
			return err
		}
		if _, err := w.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod.PodSandboxId}); err != nil {
			return err
		}
	}
	return nil
}

// raceEnabled tells whether this test was built with the race detector; the
// server then is, too.
func raceEnabled() bool {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return false
	}
	for _, s := range info.Settings {
		if s.Key == "-race" {
			return s.Value == "true"
		}
	}
	return false
}

// image pushes and pulls a variant under the test's own name and returns the
// reference; the image is removed at the test's end.
func (w *world) image(t *testing.T, change func(*imagespec.ImageConfig), files ...image.File) string {
	t.Helper()
	unique := func(c *imagespec.ImageConfig) { // or it might be another test's image, too
		c.Labels = map[string]string{"test": t.Name()}
		if change != nil {
			change(c)
		}
	}
	built, err := images.Build(unique, files...)
	if err != nil {
		t.Fatal(err)
	}
	return w.pushAndPull(t, built)
}

func (w *world) pushAndPull(t *testing.T, built *image.Artifact) string {
	t.Helper()
	repo := "variant/" + built.Digest().Encoded()[:12]
	w.Registry.Push(repo, "latest", built)
	ref := node.RegistryHost + "/" + repo + ":latest"
	w.pull(t, ref)
	t.Cleanup(func() {
		w.Images().RemoveImage(context.Background(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
	})
	return ref
}

func (w *world) pull(t *testing.T, ref string) (id string) {
	t.Helper()
	resp, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}})
	if err != nil {
		t.Fatalf("pull %s: %v", ref, err)
	}
	return resp.ImageRef
}

// each runs a test once per handler.
func each(t *testing.T, test func(t *testing.T, handler string)) {
	t.Helper()
	for _, h := range handlers {
		t.Run(h, func(t *testing.T) { test(t, h) })
	}
}

// dir is a directory of the test's own below the node's.
func (w *world) dir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(w.Path("tmp"), "t")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Clean(dir)
}
