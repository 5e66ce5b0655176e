// Package scene is the kit for tests of a running crius: a World runs pods, a
// Pod runs containers, and tests wait for containers, read their output and
// query them. A missing prerequisite ends the test; anything that a pod leaves
// behind fails it.
//
//	w := scene.Private(t, node.Options{})
//	out := w.Pod(t, "runc").Finish(t, "echo hello")
package scene

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/race"
	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// LimitSeconds is the time limit, in seconds as in CRI, for requests that are
// expected to end earlier: of a command, or of a container that ends when
// asked.
const LimitSeconds = int64(wait.Limit / time.Second)

// Handlers are the runtimes with which every test runs.
var Handlers = []string{"runc", "crun"}

// World is a node whose registry has the probe's image.
type World struct {
	*node.Node
	Empty *inventory.Snapshot // what it contains without any pod; see Settle

	mu   sync.Mutex
	gone map[string]string // see Gone
}

// New starts a node that has the probe's image. The caller must close it.
func New(ctx context.Context, o node.Options) (*World, error) {
	o.Race = race.Enabled
	n, err := node.New(ctx, o)
	if err != nil {
		return nil, err
	}
	w := &World{Node: n}
	if err := w.open(ctx); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

func (w *World) open(ctx context.Context) error {
	built, err := images.Build(nil)
	if err != nil {
		return err
	}
	w.Registry.Push("probe", "latest", built)
	if err := w.Start(ctx); err != nil {
		return err
	}
	if _, err := w.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: images.Probe}}); err != nil {
		return fmt.Errorf("pull %s: %w\n%s", images.Probe, err, w.LogTail(20))
	}
	return nil
}

// Commons is a World that the tests of a package share: the zero value makes it
// on first use. The tests must not restart or reconfigure it, and find only
// their own pods in its lists.
type Commons struct {
	// Prepare, if not nil, returns the options of the node.
	Prepare func(context.Context) (node.Options, error)
	// Also are additional handlers, beside those of every node.
	Also []string

	once  sync.Once
	world *World
	err   error
}

// World returns the shared World; without one the test fails.
func (c *Commons) World(t *testing.T) *World {
	t.Helper()
	c.once.Do(func() {
		if c.err = c.open(context.Background()); c.err != nil {
			fmt.Fprintln(os.Stderr, "the shared node:", c.err)
		}
	})
	if c.err != nil {
		t.Fatalf("the shared node: %.300v", c.err)
	}
	return c.world
}

func (c *Commons) open(ctx context.Context) (err error) {
	var o node.Options
	if c.Prepare != nil {
		if o, err = c.Prepare(ctx); err != nil {
			return err
		}
	}
	if c.world, err = New(ctx, o); err != nil {
		return err
	}
	return c.world.Settle(ctx, append(c.Also, Handlers...)...)
}

// Run is the body of a TestMain: it runs the tests, closes the Worlds that were
// used and returns the exit code.
func Run(m *testing.M, all ...*Commons) int {
	if _, err := claim.Sweep(); err != nil {
		fmt.Fprintln(os.Stderr, "sweep:", err)
	}
	code := m.Run()
	for _, c := range all {
		if c.world == nil {
			continue
		}
		if err := c.world.checkTeardown(); err != nil {
			fmt.Fprintln(os.Stderr, "FAIL: the shared node at its end:", err)
			code = 1
		}
	}
	return code
}

// checkTeardown checks what no single test can: that all of them together left the
// node as it was.
func (w *World) checkTeardown() (err error) {
	defer func() { err = errors.Join(err, w.Close()) }()
	if w.Empty == nil {
		return nil // it never became usable, and its tests have failed for that
	}
	if err := errors.Join(w.leftBehind(), w.Clean(context.Background(), w.Empty, wait.Limit)); err != nil {
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

// Private starts a node of the test's own.
func Private(t *testing.T, o node.Options) *World {
	t.Helper()
	w, err := New(t.Context(), o)
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
		if !t.Failed() {
			if err := w.leftBehind(); err != nil {
				t.Error(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// Spotless is a private node that records what it contains without any pod, for
// tests that check that nothing is left at the end.
func Spotless(t *testing.T, o node.Options) *World {
	t.Helper()
	w := Private(t, o)
	if err := w.Settle(t.Context(), Handlers...); err != nil {
		t.Fatal(err)
	}
	return w
}

// Settle runs one container per handler before it takes stock, so that
// directories made at first use do not look like leaks.
func (w *World) Settle(ctx context.Context, handlers ...string) error {
	for _, h := range handlers {
		if err := w.warmUp(ctx, h); err != nil {
			return fmt.Errorf("first pod: %w\n%s", err, w.LogTail(20))
		}
	}
	return w.TakeStock(ctx)
}

// TakeStock records what a node contains that has no pods. It does not record
// processes, because one may still be exiting.
func (w *World) TakeStock(ctx context.Context) (err error) {
	if w.Empty, err = w.Stock(ctx); err == nil {
		w.Empty.Drop(w.Empty.About("process: ")...)
	}
	return err
}

// Bare checks that the node contains only what Settle found.
func (w *World) Bare(t *testing.T) {
	t.Helper()
	w.Restored(t, w.Empty)
}

// Restored checks that the node contains exactly what it had before.
func (w *World) Restored(t *testing.T, before *inventory.Snapshot) {
	t.Helper()
	if err := w.Clean(context.Background(), before, wait.Limit); err != nil {
		t.Error(err)
	}
}

// Gone records that the test has removed a pod and its containers: when the
// node ends, nothing on it may have one of these ids in its name. An inventory
// for each pod would cost more than the pod.
func (w *World) Gone(t *testing.T, ids ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone == nil {
		w.gone = map[string]string{}
	}
	for _, id := range ids {
		w.gone[id] = t.Name()
	}
}

// Stock is that of the node once nothing is left of what tests have removed: a cleanup that has
// failed at first is retried, and the node is at rest until then.
func (w *World) Stock(ctx context.Context) (*inventory.Snapshot, error) {
	if err := w.leftBehind(); err != nil {
		return nil, err
	}
	return w.Node.Stock(ctx)
}

// leftBehind waits until nothing has an id that is gone. Its error names what
// does, and the tests.
func (w *World) leftBehind() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.gone) == 0 {
		return nil
	}
	ids := slices.Collect(maps.Keys(w.gone))
	var left []string
	var err error
	if wait.Until(context.Background(), func() bool {
		var now *inventory.Snapshot
		if now, err = w.Inventory(); err != nil {
			return true
		}
		left = now.About(ids...)
		return len(left) == 0
	}) {
		return err
	}
	var tests []string
	for _, id := range ids {
		if slices.ContainsFunc(left, func(line string) bool { return strings.Contains(line, id) }) {
			tests = append(tests, w.gone[id])
		}
	}
	slices.Sort(tests)
	return fmt.Errorf("left over by pods of %s:\n%s", strings.Join(slices.Compact(tests), ", "), inventory.Brief("", left))
}

func (w *World) warmUp(ctx context.Context, handler string) error {
	config := kubelet.Pod("first", kubelet.LogsBelow(w.Path("logs")))
	pod, err := w.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
	if err != nil {
		return err
	}
	c, err := w.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: pod.PodSandboxId, SandboxConfig: config,
		Config: kubelet.Container("first", images.Probe, []string{"sleep"}),
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
	if _, err = w.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod.PodSandboxId}); err != nil {
		return err
	}
	// A cleanup that has failed at first is retried, and the node is at rest until then.
	records := []string{filepath.Join(w.StateRoot(), "containers", c.ContainerId), filepath.Join(w.StateRoot(), "pods", pod.PodSandboxId)}
	isThere := func(path string) bool {
		_, err := os.Lstat(path)
		return !errors.Is(err, os.ErrNotExist)
	}
	if !wait.Until(ctx, func() bool { return !slices.ContainsFunc(records, isThere) }) {
		return fmt.Errorf("the first pod was removed, and a record of it stays: %q", records)
	}
	return nil
}

// Image pushes and pulls a variant of the probe under the test's own name and
// returns the reference; the image is removed at the test's end.
func (w *World) Image(t *testing.T, change func(*imagespec.ImageConfig), files ...image.File) string {
	t.Helper()
	unique := func(c *imagespec.ImageConfig) { // otherwise it might be another test's image, too
		c.Labels = map[string]string{"test": t.Name()}
		if change != nil {
			change(c)
		}
	}
	built, err := images.Build(unique, files...)
	if err != nil {
		t.Fatal(err)
	}
	return w.PushAndPull(t, built)
}

// PushAndPull is Image for an image that the test has built.
func (w *World) PushAndPull(t *testing.T, built *image.Artifact) string {
	t.Helper()
	repo := "variant/" + built.Digest().Encoded()[:12]
	w.Registry.Push(repo, "latest", built)
	ref := node.RegistryHost + "/" + repo + ":latest"
	w.Pull(t, ref)
	t.Cleanup(func() {
		_, _ = w.Images().RemoveImage(context.Background(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
	})
	return ref
}

// Pull pulls without credentials and returns the image's id.
func (w *World) Pull(t *testing.T, ref string) (id string) {
	t.Helper()
	resp, err := w.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}})
	if err != nil {
		t.Fatalf("pull %s: %v", ref, err)
	}
	return resp.ImageRef
}

// Dir returns a directory of the test's own below the node's.
func (w *World) Dir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(w.Path("tmp"), "t")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Clean(dir)
}
