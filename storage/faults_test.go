package storage

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
)

// replaceManifest makes the registry serve other bytes as any manifest.
func replaceManifest(raw []byte) registry.Fault {
	return registry.Fault{Path: "/manifests/", Do: registry.Replace(func([]byte) []byte { return raw })}
}

// noise is an image with layers of so many incompressible bytes.
func noise(t testing.TB, sizes ...int) *image.Artifact {
	t.Helper()
	var layers []image.Layer
	for _, size := range sizes {
		layers = append(layers, layer(t, image.Regular("noise", 0o644, random(size))))
	}
	return build(t, image.Image{Layers: layers})
}

// The directory in which a layer is unpacked may be taken for a leftover by another
// process that opens the store at an unlucky moment.
func TestPullSurvivesALostStagingDirectory(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	var files []image.File
	for i := range 3000 {
		files = append(files, image.Text(fmt.Sprint("file", i), "x"))
	}
	l, err := image.NewStoredLayer(files...)
	if err != nil {
		t.Fatal(err)
	}
	a := build(t, image.Image{Layers: []image.Layer{l}})
	r := serve(t, "app", "1", a)
	blob := layerDigest(a, 0)
	until, goOn := context.WithCancel(testContext(t))
	defer goOn()
	r.Inject(registry.Fault{Path: blob, Times: 1, Do: pausedAfter(len(a.Blobs[digest.Digest(blob)])/2, until.Done())})
	ended := make(chan error, 1)
	go func() {
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
		ended <- err
	}()
	wait.For(t, "files to be unpacked", func() bool {
		begun, _ := filepath.Glob(filepath.Join(n.dir, "root/overlay/tempdirs/crius-unpack-*/*/file1"))
		for _, file := range begun {
			_ = os.RemoveAll(filepath.Dir(filepath.Dir(file)))
		}
		return len(begun) > 0
	})
	goOn()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	n.noDebris()
}

// The library mounts the directory of all layers upon itself. podman and buildah do so as well, and unmount it when they end.
func TestPullWhileOtherProgramsEnd(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	const parts, files, margin = 4, 8000, 600 // a layer is unpacked three times at most; so many files may be in buffers
	var all []image.File
	for i := range files {
		all = append(all, image.Text(fmt.Sprint("file", i), "x"))
	}
	l, err := image.NewStoredLayer(all...)
	ok(t, err)
	a := build(t, image.Image{Layers: []image.Layer{l}})
	r := serve(t, "app", "1", a)
	next := make(chan struct{})
	r.Inject(registry.Fault{Path: layerDigest(a, 0), Times: 1, Do: func(http.Handler, <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			for i := range parts {
				_, _ = w.Write(l.Blob[len(l.Blob)*i/parts : len(l.Blob)*(i+1)/parts])
				_ = http.NewResponseController(w).Flush()
				select {
				case <-next:
				case <-req.Context().Done():
				}
			}
		})
	}})
	ended := make(chan error, 1)
	go func() {
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
		ended <- err
	}()
	overlay := filepath.Join(n.cfg.Root, "overlay")
	for i := 1; i <= parts; i++ {
		if i < parts {
			wait.For(t, "a part to be unpacked", func() bool {
				begun, _ := filepath.Glob(fmt.Sprintf("%s/tempdirs/*/*/file%d", overlay, files*i/parts-margin))
				return len(begun) > 0
			})
			ok(t, unix.Unmount(overlay, unix.MNT_DETACH))
			ok(t, unix.Mount(overlay, overlay, "", unix.MS_BIND, ""))
		}
		next <- struct{}{}
	}
	ok(t, <-ended)
	n.noDebris()
}

// Every fault of a registry ends in an error of the right kind, in bounded
// time, and leaves nothing; and when it is over the same pull succeeds.
func TestFaultyRegistry(t *testing.T) {
	t.Parallel()
	const small, large = 1000, 3 << 20
	for name, test := range map[string]struct {
		fault registry.Fault
		want  error // nil: any
	}{
		"ping fails":         {registry.Fault{Path: "/v2/", Do: registry.Status(503)}, fault.Unavailable},
		"manifest forbidden": {registry.Fault{Path: "/manifests/", Do: registry.Status(403)}, fault.Denied},
		"manifest 500":       {registry.Fault{Path: "/manifests/", Do: registry.Status(500)}, fault.Unavailable},
		"a page says 404":    {registry.Fault{Path: "/manifests/", Do: registry.Page(404)}, fault.NotFound},
		"a page says 403":    {registry.Fault{Path: "/manifests/", Do: registry.Page(403)}, fault.Denied},
		"manifest stalls":    {registry.Fault{Path: "/manifests/", Do: registry.Stall(10)}, fault.Timeout},
		"manifest cut":       {registry.Fault{Path: "/manifests/", Do: registry.Reset(10)}, fault.Unavailable},
		"config stalls":      {registry.Fault{Path: "/blobs/", Do: registry.Stall(0)}, fault.Timeout},
		"layer missing":      {registry.Fault{Path: "/blobs/", Do: registry.Status(404)}, fault.NotFound},
		"layer corrupt":      {registry.Fault{Path: "/blobs/", Do: registry.Replace(registry.Corrupt)}, nil},
		"layer truncated":    {registry.Fault{Path: "/blobs/", Do: registry.Replace(registry.Truncate)}, nil},
		"redirected nowhere": {registry.Fault{Path: "/blobs/", Do: registry.Redirect("http://127.0.0.1:1")}, fault.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			if errors.Is(test.want, fault.Timeout) {
				n.puller.Settings.Load().ProgressTimeout = time.Second
			}
			r := serve(t, "app", "1", noise(t, small, large))
			r.Inject(test.fault)
			_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
			if err == nil || test.want != nil && !errors.Is(err, test.want) {
				t.Errorf("%v, want %v", err, test.want)
			}
			n.empty()
			r.Heal()
			n.puller.Settings.Load().ProgressTimeout = n.cfg.ProgressTimeout
			n.pull(r.Addr() + "/app:1")
			n.noDebris()
		})
	}
}

// A connection that breaks in a large layer is resumed where it broke.
func TestBrokenConnectionResumes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 8<<20)
	r := serve(t, "app", "1", a)
	r.Inject(registry.Fault{Path: "/blobs/" + layerDigest(a, 0), Times: 1, Do: registry.Reset(5 << 20)})
	n.pull(r.Addr() + "/app:1")
	resumed := false
	for _, request := range r.Requests() {
		resumed = resumed || request.Range != ""
	}
	if !resumed {
		t.Error("the layer was not resumed")
	}
}

// A proxy that ends each connection after some bytes does not keep a layer from coming, in one pull.
func TestEveryConnectionBreaks_podman_14481_harbor_helm_2366(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 1<<20)
	blob := layerDigest(a, 0)
	r := serve(t, "app", "1", a)
	r.Inject(registry.Fault{Path: blob, Do: registry.Reset(300 << 10)})
	n.pull(r.Addr() + "/app:1")
	size := int64(len(a.Blobs[digest.Digest(blob)]))
	if wholes, parts := asked(r, blob); wholes != 1 || parts < 3 || r.Sent(blob) >= 2*size {
		t.Errorf("%d requests for the whole and %d for parts; %d bytes sent of %d", wholes, parts, r.Sent(blob), size)
	}
}

// A registry that answers with another part than it was asked for, after a connection has broken, does not spoil the
// bytes that have come: the next pull has the whole.
func TestBrokenConnectionAndAnotherPart(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 2<<20)
	blob := layerDigest(a, 0)
	r := serve(t, "app", "1", a)
	r.Inject(registry.Fault{Path: blob, Times: 1, Do: registry.Reset(1 << 20)})
	r.Inject(registry.Fault{Path: blob, Do: fromStart})
	n.fails("another part", r.Addr()+"/app:1", nil, fault.Unavailable, "unexpected EOF", "has changed it")
	if sum, _ := kept(t, n.cfg.Root); sum == 0 {
		t.Error("nothing was kept of the layer")
	}
	n.pull(r.Addr() + "/app:1")
}

func TestTooManyRequestsIsRetried(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "patience"))
	r.Inject(registry.Fault{Path: "/manifests/", Times: 1, Do: registry.TooManyRequests(1)})
	start := time.Now()
	n.pull(r.Addr() + "/app:1")
	if took := time.Since(start); took < time.Second {
		t.Errorf("asked again after %s", took)
	}
}

// A layer that stops coming ends the pull. That one which comes slowly does not, nor
// one that takes long to unpack, is the watchdog's, whose tests have a clock of their own.
func TestProgressTimeout(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 1000, 400<<10)
	n.puller.Settings.Load().ProgressTimeout = time.Second
	r := serve(t, "app", "1", a)
	r.Inject(registry.Fault{Path: "/blobs/" + layerDigest(a, 1), Do: registry.Stall(300 << 10)})
	_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
	if !errors.Is(err, fault.Timeout) {
		t.Errorf("stalled layer: %v", err)
	}
	n.empty()
}

func TestPullTimeout(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(c *Options) { c.ProgressTimeout, c.PullTimeout = 0, time.Second })
	r := serve(t, "app", "1", noise(t, 1<<20))
	r.Inject(registry.Fault{Path: "/blobs/", Do: registry.Slow(50 << 10)})
	_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
	if !errors.Is(err, fault.Timeout) {
		t.Errorf("%v", err)
	}
	n.empty()
}

// A cancelled pull leaves nothing, wherever the large files were, and layers
// that another pull needs stay.
func TestCancelledPull(t *testing.T) {
	t.Parallel()
	for name, elsewhere := range map[string]bool{"in the root": false, "elsewhere": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			temporary := t.TempDir()
			n := newNode(t, func(c *Options) {
				if elsewhere {
					c.TemporaryDir = temporary
				}
			})
			first, second := noise(t, 500<<10, 500<<10), noise(t, 1000, 500<<10)
			r := serve(t, "app", "1", first)
			r.Push("app", "2", second)
			r.Inject(registry.Fault{Path: "/blobs/" + layerDigest(first, 1), Do: registry.Stall(1000)})
			r.Inject(registry.Fault{Path: "/blobs/" + layerDigest(second, 1), Do: registry.Slow(500 << 10)})

			ctx, cancel := context.WithCancel(testContext(t))
			cancelled := make(chan error, 1)
			go func() {
				_, err := n.Pull(ctx, PullRequest{Image: r.Addr() + "/app:1"})
				cancelled <- err
			}()
			n.waitLayers(1) // its first layer is unpacked
			slow := make(chan error, 1)
			go func() {
				_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:2"})
				slow <- err
			}()
			n.waitLayers(2) // one of the other pull's, which no image has yet
			cancel()
			if err := <-cancelled; !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled pull: %v", err)
			}
			if err := <-slow; err != nil {
				t.Errorf("the other pull: %v", err)
			}
			if images := n.list(); len(images) != 1 || images[0].ID != second.ID() {
				t.Errorf("images %+v", images)
			}
			fetched := 0
			for _, request := range r.Requests() {
				if strings.Contains(request.Path, layerDigest(second, 0)) {
					fetched++
				}
			}
			if fetched != 1 {
				t.Errorf("the other pull had to fetch its layer %d times", fetched)
			}
			n.remove(second.ID())
			n.empty()
			left := slices.DeleteFunc(entriesOf(t, temporary), func(name string) bool { return name == download.Name })
			if len(left) > 0 {
				t.Errorf("left in the temporary directory: %q", left)
			}
		})
	}
}

// A registry that never ends its answer, or never stops sending, holds up no pull.
func TestLayerWithoutAnEnd(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 100<<10)
	r := serve(t, "app", "1", a)
	for _, more := range []int{0, 1 << 20} {
		r.Heal()
		r.Inject(registry.Fault{Path: "/blobs/" + layerDigest(a, 0), Do: func(_ http.Handler, stop <-chan struct{}) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_, _ = w.Write(slices.Concat(a.Blobs[digest.Digest(layerDigest(a, 0))], make([]byte, more)))
				_ = http.NewResponseController(w).Flush()
				<-stop
			})
		}})
		img := n.pull(r.Addr() + "/app:1")
		n.remove(img.ID)
		n.empty()
	}
}

// What a registry has to say to users is shown: printable, short, and not without end. Here the manifest
// comes with warnings, and layers are sent on to another host, which has some, too.
func TestWarningsOfRegistries(t *testing.T) {
	t.Parallel()
	warned := func(texts ...string) registry.Action {
		return func(h http.Handler, _ <-chan struct{}) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				for _, text := range texts {
					w.Header().Add("Warning", text)
				}
				h.ServeHTTP(w, req)
			})
		}
	}
	n := newNode(t)
	r, blobs := serve(t, "app", "1", motd(t, "warned")), serve(t, "app", "1", motd(t, "warned"))
	r.Inject(registry.Fault{Path: "/manifests/", Do: warned(`299 - "this tag ends \"soon\": see https://u:pw@r.test/x?y=z"`, `299 - "`+strings.Repeat("long ", 100)+`"`,
		"299 - \"a\u202eb\xff\"", `110 - "stale"`, `299 other "of no registry"`)})
	r.Inject(registry.Fault{Path: "/blobs/", Do: registry.Redirect("http://" + blobs.Addr())})
	blobs.Inject(registry.Fault{Path: "/blobs/", Do: warned(`299 - "from the storage"`)})
	name := r.Addr() + "/app:1"
	n.pull(name)
	var got []string
	for _, w := range n.Pulls().Warnings() {
		if w.Image != name || w.Registry != r.Addr() && w.Registry != blobs.Addr() || len(w.Text) > 260 {
			t.Errorf("%+v", w)
		}
		got = append(got, w.Text[:min(len(w.Text), 20)])
	}
	want := []string{`this tag ends "soon"`, "long long long long ", "a b\uFFFD", "from the storage"}
	if slices.Sort(got); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
		t.Errorf("%q, want %q", got, want)
	}

	many := make([]string, 2000)
	for i := range many {
		many[i] = fmt.Sprintf(`299 - "warning %d"`, i)
	}
	r.Heal()
	r.Inject(registry.Fault{Path: "/manifests/", Do: warned(many...)})
	if _, err := n.Pull(testContext(t), PullRequest{Image: name}); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "sent more than 1000 different warnings") {
		t.Errorf("a registry that warns without end: %v", err)
	}
}

// A pull that waits because its registry asks it to says so, and does not hold up the end of the
// server.
func TestRegistryThatAsksToWait(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "patience"))
	r.Inject(registry.Fault{Path: "/manifests/", Do: registry.TooManyRequests(3600)})
	name := r.Addr() + "/app:1"
	tracer := trace.New()
	ended := make(chan error, 1)
	go func() {
		ended <- tracer.Do(testContext(t), "pull image", name, func(ctx context.Context) error {
			_, err := n.Pull(ctx, PullRequest{Image: name})
			return err
		})
	}()
	throttled := func() bool {
		pulls, work := n.Pulls().Active(), tracer.Active()
		return len(pulls) == 1 && pulls[0].Image == name && pulls[0].Throttled == r.Addr() && time.Until(pulls[0].Until) > 0 &&
			len(work) == 1 && work[0].Step == "registry asks to wait" && work[0].WaitsFor == r.Addr() && work[0].Until.Equal(pulls[0].Until)
	}
	if !wait.Until(t.Context(), throttled) {
		t.Errorf("pulls: %+v; work: %+v", n.Pulls().Active(), tracer.Active())
	}
	n.Pulls().Interrupt()
	if err := <-ended; !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "crius is stopping, and registry "+r.Addr()+" has asked to wait until") {
		t.Errorf("interrupted: %v", err)
	}
	if pulls := n.Pulls().Active(); len(pulls) != 0 {
		t.Errorf("still listed: %+v", pulls)
	}
}
