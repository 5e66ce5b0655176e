package storage

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/artifact"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
	"github.com/crius-run/crius/test/kit/wait"
)

const mega = 1 << 20

// kept are the bytes of downloads that lie in a directory, and their files.
func kept(t testing.TB, parent string) (sum int64, files []string) {
	t.Helper()
	for _, dir := range []string{parent, artifact.In(parent)} {
		err := filepath.WalkDir(filepath.Join(dir, download.Name), func(path string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || e.IsDir() {
				return err
			}
			info, err := e.Info()
			if err == nil {
				sum += info.Size()
				files = append(files, path)
			}
			return err
		})
		ok(t, err)
	}
	return sum, files
}

// noRanges has a registry send blobs as a whole, whatever part is asked for.
func noRanges(answer http.Handler, _ <-chan struct{}) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		req = req.Clone(req.Context())
		req.Header.Del("Range")
		answer.ServeHTTP(w, req)
	})
}

// untyped answers without a Content-Type.
func untyped(answer http.Handler, _ <-chan struct{}) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		answer.ServeHTTP(untypedAnswer{w}, req)
	})
}

type untypedAnswer struct{ http.ResponseWriter }

// WriteHeader implements http.ResponseWriter. A nil value keeps net/http from guessing the type.
func (w untypedAnswer) WriteHeader(status int) {
	w.Header()["Content-Type"] = nil
	w.ResponseWriter.WriteHeader(status)
}

// fromStart has it send the beginning of blobs as any part of them.
func fromStart(answer http.Handler, _ <-chan struct{}) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Header.Get("Range") != "" {
			req = req.Clone(req.Context())
			req.Header.Set("Range", "bytes=0-")
		}
		answer.ServeHTTP(w, req)
	})
}

// A pull of an image or an artifact that failed is continued by the next one, which asks only for
// the missing bytes, whatever ended the first.
func TestPullResumes(t *testing.T) {
	t.Parallel()
	for kind, make := range map[string]func(*testing.T) *image.Artifact{
		"image":    func(t *testing.T) *image.Artifact { return noise(t, 4*mega) },
		"artifact": func(t *testing.T) *image.Artifact { return files(t, image.Files{"model": string(random(4 * mega))}) },
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			testPullResumes(t, make)
		})
	}
}

func testPullResumes(t *testing.T, make func(*testing.T) *image.Artifact) {
	for name, test := range map[string]struct {
		first func(n *node, r *registry.Registry, name, blob string) // the pull that fails
		next  registry.Action                                        // of the second one
		whole bool                                                   // the registry has to send all bytes again
		fails bool                                                   // the second pull, which costs nothing of what is here
	}{
		"cut":            {first: (*node).cutPull},
		"stuck":          {first: (*node).stuckPull},
		"cancelled":      {first: (*node).failPull},
		"no ranges":      {first: (*node).failPull, next: noRanges, whole: true},
		"wrong range":    {first: (*node).failPull, next: fromStart, whole: true},
		"ranges refused": {first: (*node).failPull, next: onlyRanges(registry.Status(400)), whole: true},
		"ranges unknown": {first: (*node).failPull, next: onlyRanges(registry.Status(501)), whole: true},
		"untyped range":  {first: (*node).failPull, next: untyped, whole: true},
		"ranges reset":   {first: (*node).failPull, next: onlyRanges(registry.Reset(0)), fails: true, whole: true},
		"skipped for long": {first: (*node).failPull, next: onlyRanges(func(answer http.Handler, stop <-chan struct{}) http.Handler {
			return noRanges(registry.Stall(1000)(answer, stop), stop)
		}), whole: true},
		"redirected":      {first: (*node).failPull, next: redirected},
		"unwanted answer": {first: (*node).failPull, next: onlyRanges(registry.Page(503)), fails: true, whole: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			a := make(t)
			blob := layerDigest(a, 0)
			size := int64(len(a.Blobs[digest.Digest(blob)]))
			r := serve(t, "app", "1", a)
			test.first(n, r, "app:1", blob)
			n.empty()
			here, _ := kept(t, n.cfg.Root)
			if here < mega-mega/4 {
				t.Fatalf("%d bytes are kept", here)
			}
			if test.next != nil {
				r.Inject(registry.Fault{Path: blob, Do: test.next})
			}
			if test.fails {
				if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); err == nil {
					t.Error("the second pull has not failed")
				}
				if still, _ := kept(t, n.cfg.Root); still != here {
					t.Errorf("%d bytes are kept of %d", still, here)
				}
			}
			before := n.pulls.Bytes.Load()
			n.pull(r.Addr() + "/app:1")
			switch sent := r.Sent(blob); {
			case test.whole && sent < size:
				t.Errorf("%d bytes were sent of %d", sent, size)
			case !test.whole && sent != size-here:
				t.Errorf("%d bytes were sent, want the %d that were missing", sent, size-here)
			}
			if !test.whole && (n.pulls.Resumed.Load() != here || n.pulls.Bytes.Load()-before >= size) {
				t.Errorf("counted %d bytes as resumed, %d as downloaded", n.pulls.Resumed.Load(), n.pulls.Bytes.Load()-before)
			}
			n.noDebris()
			if _, files := kept(t, n.cfg.Root); len(files) > 0 {
				t.Errorf("left: %q", files)
			}
		})
	}
}

// onlyRanges applies do to requests for a part.
func onlyRanges(do registry.Action) registry.Action {
	return onlyWhere(do, func(part string) bool { return part != "" })
}

// onlyWhere applies do to requests for parts that such accepts. part is the header Range; empty:
// the whole is requested.
func onlyWhere(do registry.Action, such func(part string) bool) registry.Action {
	return func(answer http.Handler, stop <-chan struct{}) http.Handler {
		spoiled := do(answer, stop)
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if such(req.Header.Get("Range")) {
				spoiled.ServeHTTP(w, req)
			} else {
				answer.ServeHTTP(w, req)
			}
		})
	}
}

// redirected sends clients to another address, as registries do that keep blobs elsewhere.
func redirected(answer http.Handler, _ <-chan struct{}) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.RawQuery == "" {
			w.Header().Set("Location", req.URL.Path+"?signed=1")
			w.WriteHeader(http.StatusTemporaryRedirect)
			return
		}
		answer.ServeHTTP(w, req)
	})
}

// What a server that was killed has fetched is not fetched again.
func TestPullResumesAfterKill(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 1000, 4*mega)
	blob := layerDigest(a, 1)
	size := int64(len(a.Blobs[digest.Digest(blob)]))
	r := serve(t, "app", "1", a)
	ok(t, n.Close(t.Context()))
	r.Inject(registry.Fault{Path: blob, Do: registry.Stall(3 * mega)})
	server := n.child("pull", r.Addr()+"/app:1")
	wait.For(t, "a part of the layer", func() bool { sum, _ := kept(t, n.cfg.Root); return sum > 2*mega })
	server.kill()
	wait.For(t, "the worker to end", func() bool { return len(n.workers()) == 0 })
	n.open()
	n.empty()
	parts, err := filepath.Glob(filepath.Join(n.cfg.Root, download.Name, "sha256-"+blob[len("sha256:"):]+"-*"))
	ok(t, err)
	if len(parts) != 1 {
		t.Fatalf("parts: %q", parts)
	}
	info, err := os.Stat(parts[0])
	ok(t, err)
	r.Heal()
	r.Forget()
	n.pull(r.Addr() + "/app:1")
	if sent := r.Sent(blob); sent != size-info.Size() {
		t.Errorf("%d bytes were sent, want the %d that were missing", sent, size-info.Size())
	}
	if _, files := kept(t, n.cfg.Root); len(files) > 0 {
		t.Errorf("left: %q", files)
	}
}

// A power cut may leave anything in the files: the pull finds out and fetches all.
func TestDamagedDownloads(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(*testing.T, string){
		"zeros":      func(t *testing.T, path string) { truncate(t, path); ok(t, os.Truncate(path, mega)) },
		"empty":      func(t *testing.T, path string) { truncate(t, path) },
		"bit":        func(t *testing.T, path string) { flipBit(t, path, 1000) },
		"header":     func(t *testing.T, path string) { flipBit(t, path, 1) },
		"too long":   func(t *testing.T, path string) { ok(t, os.Truncate(path, 10*mega)) },
		"other mode": func(t *testing.T, path string) { ok(t, os.Chmod(path, 0)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			a := noise(t, 2*mega)
			r := serve(t, "app", "1", a)
			n.failPull(r, "app:1", layerDigest(a, 0))
			_, files := kept(t, n.cfg.Root)
			if len(files) != 1 {
				t.Fatalf("kept: %q", files)
			}
			damage(t, files[0])
			n.pull(r.Addr() + "/app:1")
			if _, files := kept(t, n.cfg.Root); len(files) > 0 {
				t.Errorf("left: %q", files)
			}
		})
	}
}

func flipBit(t *testing.T, path string, at int64) {
	t.Helper()
	content, err := os.ReadFile(path)
	ok(t, err)
	content[at] ^= 1
	ok(t, os.WriteFile(path, content, 0o600))
}

// failPull pulls until a part of a blob has come, and calls that off.
func (n *node) failPull(r *registry.Registry, name, blob string) {
	n.t.Helper()
	r.Inject(registry.Fault{Path: blob, Do: registry.Stall(mega)})
	ctx, cancel := context.WithCancel(testContext(n.t))
	ended := make(chan error, 1)
	go func() {
		_, err := n.Pull(ctx, PullRequest{Image: r.Addr() + "/" + name})
		ended <- err
	}()
	wait.For(n.t, "a part of the layer", func() bool { sum, _ := kept(n.t, n.cfg.Root); return sum >= mega-mega/4 })
	cancel()
	if err := <-ended; err == nil {
		n.t.Fatal("pulled")
	}
	r.Heal()
	r.Forget()
}

// cutPull pulls until the connection breaks in a blob, and cannot be made again.
func (n *node) cutPull(r *registry.Registry, name, blob string) {
	n.t.Helper()
	r.Inject(registry.Fault{Path: blob, Times: 1, Do: registry.Reset(mega)})
	r.Inject(registry.Fault{Path: blob, Do: registry.Status(503)})
	if _, err := n.Pull(testContext(n.t), PullRequest{Image: r.Addr() + "/" + name}); err == nil {
		n.t.Fatal("pulled")
	}
	r.Heal()
	r.Forget()
}

// stuckPull pulls until the registry has sent nothing for so long that the pull is given up,
// in the midst of a blob: how long a machine needs to come to that is not known before.
func (n *node) stuckPull(r *registry.Registry, name, blob string) {
	n.t.Helper()
	defer func(usual time.Duration) {
		n.cfg.ProgressTimeout = usual
		n.restart()
	}(n.cfg.ProgressTimeout)
	for n.cfg.ProgressTimeout = time.Second; ; n.cfg.ProgressTimeout *= 2 {
		n.restart()
		r.Inject(registry.Fault{Path: blob, Do: registry.Stall(mega)})
		if _, err := n.Pull(testContext(n.t), PullRequest{Image: r.Addr() + "/" + name}); !errors.Is(err, fault.Timeout) {
			n.t.Fatal(err)
		}
		r.Heal()
		r.Forget()
		if sum, _ := kept(n.t, n.cfg.Root); sum >= mega-mega/4 {
			return
		}
	}
}

// Layers that a failed pull has unpacked go with it, but are not fetched again either.
func TestUnpackedLayersAreResumed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 500<<10, 2*mega)
	r := serve(t, "app", "1", a)
	r.Inject(registry.Fault{Path: layerDigest(a, 1), Do: registry.Stall(mega)})
	ctx, cancel := context.WithCancel(testContext(t))
	ended := make(chan error, 1)
	go func() {
		_, err := n.Pull(ctx, PullRequest{Image: r.Addr() + "/app:1"})
		ended <- err
	}()
	n.waitLayers(1)
	cancel()
	<-ended
	n.empty()
	r.Heal()
	r.Forget()
	n.pull(r.Addr() + "/app:1")
	if sent := r.Sent(layerDigest(a, 0)); sent != 1 {
		t.Errorf("%d bytes of a whole layer were sent, want one, by which the registry agrees", sent)
	}
}

// pausedAfter has an answer wait after its first bytes.
func pausedAfter(after int, until <-chan struct{}) registry.Action {
	return func(answer http.Handler, stop <-chan struct{}) http.Handler {
		begun := registry.Stall(after)
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			ctx, cancel := context.WithCancel(req.Context())
			defer cancel()
			go func() {
				select {
				case <-until:
				case <-ctx.Done():
				}
				cancel()
			}()
			begun(answer, stop).ServeHTTP(w, req.WithContext(ctx))
			if req.Context().Err() == nil {
				rest := &recorded{header: http.Header{}}
				answer.ServeHTTP(rest, req)
				_, _ = w.Write(rest.Bytes()[after:])
			}
		})
	}
}

// recorded is an answer.
type recorded struct {
	bytes.Buffer
	header http.Header
}

func (r *recorded) Header() http.Header { return r.header }
func (r *recorded) WriteHeader(int)     {}

// A layer that two images, or artifacts, from one registry share is downloaded once, even if the
// pull that began it is cancelled.
func TestPullsShareALayer(t *testing.T) {
	t.Parallel()
	base, own := layer(t, image.Regular("noise", 0o644, random(2*mega))), layer(t, image.Text("a", "2"))
	model := string(random(2 * mega))
	for kind, pushed := range map[string][2]*image.Artifact{
		"image":    {build(t, image.Image{Layers: []image.Layer{base}}), build(t, image.Image{Layers: []image.Layer{base, own}})},
		"artifact": {files(t, image.Files{"model": model}), files(t, image.Files{"model": model, "own": "own"})},
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			testPullsShareALayer(t, pushed[0], pushed[1])
		})
	}
}

func testPullsShareALayer(t *testing.T, one, two *image.Artifact) {
	for name, called := range map[string]bool{"both": false, "first one called off": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.downloads.Patience, n.downloads.Beside.Patience = time.Hour, time.Hour
			blob, own := layerDigest(two, 0), layerDigest(two, 1)
			size := int64(len(two.Blobs[digest.Digest(blob)]))
			r := serve(t, "one", "1", one)
			r.Push("two", "1", two)
			until, finish := context.WithCancel(testContext(t))
			defer finish()
			r.Inject(registry.Fault{Path: blob, Times: 1, Do: pausedAfter(mega, until.Done())})
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			first, second := make(chan error, 1), make(chan error, 1)
			pull := func(ctx context.Context, name string, ended chan<- error) {
				_, err := n.Pull(ctx, PullRequest{Image: r.Addr() + "/" + name + ":1"})
				ended <- err
			}
			go pull(ctx, "one", first)
			wait.For(t, "a part of the layer", func() bool { sum, _ := kept(t, n.cfg.Root); return sum >= mega-mega/4 })
			go pull(testContext(t), "two", second)
			wait.For(t, "the second pull", func() bool { return r.Sent(own) > 0 })
			if most := size + 1; !called {
				finish()
				ok(t, <-first)
				ok(t, <-second)
				if sent := r.Sent(blob); sent > most {
					t.Errorf("%d bytes were sent, want %d at most", sent, most)
				}
			} else {
				cancel()
				if err := <-first; !errors.Is(err, context.Canceled) {
					t.Errorf("first pull: %v", err)
				}
				ok(t, <-second)
				if sent := r.Sent(blob); sent > most+mega/4 { // some were under way
					t.Errorf("%d bytes were sent, want %d at most", sent, most+mega/4)
				}
			}
			if _, files := kept(t, n.cfg.Root); len(files) > 0 {
				t.Errorf("left: %q", files)
			}
		})
	}
}

// A layer that is here as a whole is not given to a pull that its registry refuses it to.
func TestKeptLayerNeedsTheRegistrysLeave(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	secret := layer(t, image.Regular("noise", 0o600, random(mega)))
	other := layer(t, image.Regular("noise", 0o600, random(2*mega)))
	r := serve(t, "owner", "1", build(t, image.Image{Layers: []image.Layer{secret, other}}))
	r.Push("thief", "1", build(t, image.Image{Layers: []image.Layer{secret}}))
	r.Inject(registry.Fault{Path: other.Digest.String(), Do: registry.Stall(mega)})
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := n.Pull(ctx, PullRequest{Image: r.Addr() + "/owner:1"})
		ended <- err
	}()
	n.waitLayers(1)
	cancel()
	<-ended // the layer is no longer in the store
	r.Inject(registry.Fault{Path: "/thief/blobs/" + secret.Digest.String(), Do: registry.Status(403)})
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/thief:1"}); !errors.Is(err, fault.Denied) {
		t.Errorf("thief: %v", err)
	}
	n.empty()
	r.Heal()
	r.Forget()
	n.pull(r.Addr() + "/owner:1")
	if sent := r.Sent(secret.Digest.String()); sent != 1 {
		t.Errorf("%d bytes of the layer were sent: the thief has destroyed it", sent)
	}
}

// On a full disk the downloads that are kept, of the same and of other pulls, are deleted.
func TestDownloadsMakeRoom(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ok(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=3m"))
	t.Cleanup(func() { ok(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	n := newNode(t, func(c *Options) { c.TemporaryDir = dir })
	n.downloads.Limits.Share = 1
	old := filepath.Join(dir, download.Name, "sha256-old")
	ok(t, os.MkdirAll(filepath.Dir(old), 0o700))
	ok(t, os.WriteFile(old, make([]byte, mega), 0o600))
	r := serve(t, "app", "1", noise(t, mega*5/2))
	r.Push("app", "2", noise(t, 4*mega))
	n.pull(r.Addr() + "/app:1") // fits without the old file alone
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:2"}); !errors.Is(err, fault.Exhausted) {
		t.Errorf("%v", err)
	}
	if _, files := kept(t, dir); len(files) > 0 {
		t.Errorf("left: %q", files)
	}
}

// When somebody else fills the disk, the kubelet removes images, and downloads of images and
// artifacts go as well.
func TestRemovalSweepsDownloads(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", noise(t, 1))
	image := n.pull(r.Addr() + "/app:1").ID
	n.downloads.Limits.Share = 1
	for _, parent := range []string{n.cfg.Root, filepath.Join(n.cfg.Root, "crius-artifacts")} {
		dir := filepath.Join(parent, download.Name)
		ok(t, os.MkdirAll(dir, 0o700))
		ok(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=3m"))
		t.Cleanup(func() { ok(t, unix.Unmount(dir, unix.MNT_DETACH)) })
		ok(t, os.WriteFile(filepath.Join(dir, "sha256-old"), make([]byte, 2*mega), 0o600))
	}
	n.remove(image)
	if _, files := kept(t, n.cfg.Root); len(files) > 0 {
		t.Errorf("left: %q", files)
	}
}

// Downloads that another configuration has left go with the next start.
func TestDownloadsElsewhere(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ok(t, n.Close(t.Context()))
	old := filepath.Join(n.cfg.Root, download.Name)
	ok(t, os.MkdirAll(filepath.Join(old, "sha256-old"), 0o700))
	n.cfg.TemporaryDir = t.TempDir()
	n.open()
	if _, err := os.Stat(old); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// What a wipe leaves has none of it.
func TestWipeDeletesDownloads(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 2*mega)
	r := registrytest.Start(t)
	r.Push("app", "1", a)
	n.failPull(r, "app:1", layerDigest(a, 0))
	ok(t, n.Forget())
	if _, err := os.Stat(filepath.Join(n.cfg.Root, download.Name)); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}
