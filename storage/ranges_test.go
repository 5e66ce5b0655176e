package storage

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
)

// smallRange is the size of ranges in tests, where it can be chosen.
const smallRange = 256 << 10

// onlyWhole applies do to requests for whole blobs.
func onlyWhole(do registry.Action) registry.Action {
	return onlyWhere(do, func(part string) bool { return part == "" })
}

// asked counts the requests for a blob as a whole, and for parts of it.
func asked(r *registry.Registry, blob string) (wholes, parts int) {
	for _, request := range r.Requests() {
		switch {
		case filepath.Base(request.Path) != blob:
		case request.Range == "":
			wholes++
		default:
			parts++
		}
	}
	return wholes, parts
}

// threeConnections allows three connections for each pull.
func threeConnections(o *Options) { o.PullConnections = 3 }

// A large layer, or file of an artifact, is fetched over several connections, which the list of
// pulls shows.
func TestPullOverSeveralConnections(t *testing.T) {
	t.Parallel()
	keys := t.TempDir()
	public := keyPair(t, filepath.Join(keys, "a.pem"), nil)
	for kind, test := range map[string]struct {
		make  func(*testing.T) *image.Artifact
		size  int // of a range
		parts int
	}{
		"image":           {func(t *testing.T) *image.Artifact { return noise(t, 15*smallRange) }, smallRange, 14},
		"encrypted image": {func(t *testing.T) *image.Artifact { return encrypt(t, noise(t, 15*smallRange), public) }, smallRange, 14},
		"artifact":        {func(t *testing.T) *image.Artifact { return files(t, image.Files{"model": string(random(34 * mega))}) }, 16 * mega, 1},
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, threeConnections, func(c *Options) { c.DecryptionKeysPath = keys })
			n.downloads.RangeSize = smallRange
			n.downloads.Patience, n.downloads.Beside.Patience = time.Hour, time.Hour
			a := test.make(t)
			blob := layerDigest(a, 0)
			r := serve(t, "app", "1", a)
			until, goOn := context.WithCancel(testContext(t))
			defer goOn()
			r.Inject(registry.Fault{Path: blob, Do: onlyWhole(pausedAfter(2*test.size-1000, until.Done()))})
			ended := make(chan error, 1)
			go func() {
				_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
				ended <- err
			}()
			wait.For(t, "more bytes than come over the first connection", func() bool {
				active := n.pulls.Active()
				return len(active) == 1 && active[0].Bytes > int64(2*test.size) && active[0].Connections >= 1
			})
			goOn()
			ok(t, <-ended)
			if wholes, parts := asked(r, blob); wholes != 1 || parts != test.parts {
				t.Errorf("asked for the whole %d times, for %d parts", wholes, parts)
			}
			if came, size := n.pulls.Bytes.Load(), int64(len(a.Blobs[digest.Digest(blob)])); came < size || came > size+mega {
				t.Errorf("counted %d bytes of %d", came, size)
			}
			n.noDebris()
			if _, files := kept(t, n.cfg.Root); len(files) > 0 {
				t.Errorf("left: %q", files)
			}
		})
	}
}

// A pull from a registry that cannot send parts, or not over more than one connection, behaves as
// without ranges: it asks for the whole layer, once.
func TestPullWithoutRanges(t *testing.T) {
	t.Parallel()
	hangs := func(http.Handler, <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { <-req.Context().Done() })
	}
	for name, test := range map[string]struct {
		do   registry.Action // to those who ask for parts
		most int             // parts that are asked for: some more where the answer may come too late
	}{
		"ignored":             {noRanges, 4},
		"wrong part":          {fromStart, 8},
		"refused":             {registry.Status(416), 4},
		"bad request":         {registry.Status(400), 4},
		"forbidden":           {registry.Status(403), 6},
		"too many requests":   {registry.TooManyRequests(1), 8},
		"come back later":     {registry.TooManyRequests(3600), 4},
		"unavailable":         {registry.Page(503), 6},
		"no answer":           {hangs, 4},
		"stuck":               {registry.Stall(100 << 10), 60},
		"cut":                 {registry.Reset(100 << 10), 60},
		"cut before anything": {registry.Reset(0), 9},
		"short":               {registry.Replace(registry.Truncate), 60},
		"redirected":          {redirected, 60},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, threeConnections)
			n.downloads.RangeSize, n.downloads.Patience = smallRange, 200*time.Millisecond
			a := noise(t, 15*smallRange)
			blob := layerDigest(a, 0)
			r := serve(t, "app", "1", a)
			until, goOn := context.WithCancel(testContext(t))
			defer goOn()
			paused, spoiled := pausedAfter(2*smallRange-1000, until.Done()), onlyFirstRanges(test.do)
			r.Inject(registry.Fault{Path: blob, Do: func(answer http.Handler, stop <-chan struct{}) http.Handler {
				return onlyWhole(paused)(spoiled(answer, stop), stop)
			}})
			ended := make(chan error, 1)
			go func() {
				_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
				ended <- err
			}()
			wait.For(t, "a part to be asked for", func() bool { _, parts := asked(r, blob); return parts > 0 })
			goOn()
			ok(t, <-ended)
			if wholes, parts := asked(r, blob); wholes != 1 || parts > test.most {
				t.Errorf("asked for the whole %d times, for %d parts", wholes, parts)
			}
			n.noDebris()
			if _, files := kept(t, n.cfg.Root); len(files) > 0 {
				t.Errorf("left: %q", files)
			}
		})
	}
}

// onlyFirstRanges applies do to requests for a part that ends before the blob.
func onlyFirstRanges(do registry.Action) registry.Action {
	return onlyWhere(do, func(part string) bool { return part != "" && !strings.HasSuffix(part, "-") })
}

// Ranges that have come ahead when the server is killed are fetched again, and the beginning of the
// layer is kept.
func TestKillWhileRangesCome(t *testing.T) {
	t.Parallel()
	const first, size = 32*mega - 1000, 40 * mega
	n := newNode(t, threeConnections)
	a := noise(t, size)
	blob := layerDigest(a, 0)
	content := a.Blobs[digest.Digest(blob)]
	r := serve(t, "app", "1", a)
	ok(t, n.Close(t.Context()))
	r.Inject(registry.Fault{Path: blob, Do: onlyWhole(registry.Stall(first))})
	server := n.child("pull", r.Addr()+"/app:1")
	wait.For(t, "the beginning and the end of the layer", func() bool {
		sum, _ := kept(t, n.cfg.Root)
		return sum > first-mega && r.Sent(blob) >= first+size-32*mega
	})
	server.kill()
	wait.For(t, "the worker to end", func() bool { return len(n.workers()) == 0 })
	n.open()
	n.empty()
	here, parts := kept(t, n.cfg.Root)
	if len(parts) != 1 {
		t.Fatalf("kept: %q", parts)
	}
	if beginning, err := os.ReadFile(parts[0]); err != nil || !bytes.HasPrefix(content, beginning) || here > first {
		t.Fatalf("%d bytes are kept, which may not be the beginning, %v", here, err)
	}
	r.Heal()
	r.Forget()
	n.pull(r.Addr() + "/app:1")
	if sent := r.Sent(blob); sent != int64(len(content))-here {
		t.Errorf("%d bytes were sent, want the %d that were missing", sent, int64(len(content))-here)
	}
}
