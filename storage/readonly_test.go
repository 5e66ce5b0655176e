package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
)

// ends fails the test if f panics or hangs; its error is returned.
func ends(t *testing.T, what string, f func(ctx context.Context) error) error {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- panics.Do(t.Context(), what, func() error { return f(testContext(t)) }) }()
	select {
	case err := <-ended:
		if errors.Is(err, fault.Internal) {
			t.Errorf("%s panics", what)
		}
		return err
	case <-time.After(wait.Limit):
		t.Fatalf("%s hangs", what)
		return nil
	}
}

// readOnly makes the disk of a root read-only until repair is called. The root is mounted over
// itself for that: a disk on which files are open for writing cannot be remounted.
func readOnly(t *testing.T, root string) (repair func()) {
	t.Helper()
	repair = sync.OnceFunc(func() {
		if err := unix.Unmount(root, unix.MNT_DETACH); err != nil {
			t.Errorf("make the root writable: %v", err)
		}
	})
	if err := unix.Mount(root, root, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(repair)
	if err := unix.Mount("", root, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	return repair
}

// On a disk that became read-only no call panics or hangs, for containers/storage would keep
// its locks for ever; and once it is repaired all calls work again.
func TestReadOnlyDiskLocksNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "used"))
	r.Push("app", "2", motd(t, "unused"))
	used, unused := n.pull(r.Addr()+"/app:1"), n.pull(r.Addr()+"/app:2")
	n.holds.grace = 0
	mounted, other := n.rootfs("mounted", used.ID), n.rootfs("other", unused.ID)
	n.mount(mounted)
	images := n.list()

	repair := readOnly(t, n.cfg.Root)
	for range 2 {
		if err := ends(t, "list", func(ctx context.Context) error {
			listed, err := n.Images(ctx)
			if len(listed) != len(images) {
				t.Errorf("%d images are listed, want %d", len(listed), len(images))
			}
			return err
		}); err != nil {
			t.Errorf("list: %v", err)
		}
	}
	for what, call := range map[string]func(ctx context.Context) error{
		"status": func(ctx context.Context) error { _, err := n.Image(ctx, used.ID); return err },
		"usage":  func(ctx context.Context) error { _, _, err := n.FsInfo(ctx); return err },
		"sizes":  func(context.Context) error { _, _, err := n.Sizes(); return err },
		"mount":  func(ctx context.Context) error { return n.MountRootfs(ctx, n.rootfs("again", used.ID)) },
	} {
		if err := ends(t, what, call); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, call := range map[string]func(ctx context.Context) error{
		"config":                   func(ctx context.Context) error { _, err := n.Spec(ctx, used); return err },
		"mount of an unused image": func(ctx context.Context) error { return n.MountRootfs(ctx, other) },
		"remove":                   func(ctx context.Context) error { return n.Remove(ctx, unused.ID) },
		"adopt":                    func(ctx context.Context) error { return n.Adopt(ctx, nil) },
		"pull": func(ctx context.Context) error {
			_, err := n.Pull(ctx, PullRequest{Image: r.Addr() + "/app:2"})
			return err
		},
		"verify": func(ctx context.Context) error { _, err := n.Verify(ctx, []Rootfs{mounted}); return err },
	} {
		if err := ends(t, what, call); !errors.Is(err, fault.Unavailable) {
			t.Errorf("%s: %v, want %v", what, err, fault.Unavailable)
		}
	}
	_ = ends(t, "remove root file systems", func(ctx context.Context) error {
		return errors.Join(n.RemoveRootfs(ctx, n.rootfs("again", used.ID)), n.RemoveRootfs(ctx, other), n.RemoveRootfs(ctx, mounted))
	})

	repair()
	n.wantReady("repaired")
	for what, call := range map[string]func(ctx context.Context) error{
		"list":   func(ctx context.Context) error { _, err := n.Images(ctx); return err },
		"mount":  func(ctx context.Context) error { return n.MountRootfs(ctx, other) },
		"remove": func(ctx context.Context) error { return n.Remove(ctx, used.ID) },
	} {
		if err := ends(t, what+" when repaired", call); err != nil {
			t.Errorf("%s when repaired: %v", what, err)
		}
	}
	for _, r := range []Rootfs{mounted, n.rootfs("again", used.ID), other} {
		n.removeRootfs(r)
	}
	n.remove(unused.ID)
	n.empty()
}

// A pull whose disk becomes read-only meanwhile ends with an error, and loses no lock.
func TestDiskBecomesReadOnlyDuringPull(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 100<<10)
	r := serve(t, "app", "1", a)
	until, goOn := context.WithCancel(testContext(t))
	defer goOn()
	r.Inject(registry.Fault{Path: "/blobs/" + layerDigest(a, 0), Times: 1, Do: pausedAfter(1000, until.Done())})
	ended := make(chan error, 1)
	go func() {
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
		ended <- err
	}()
	wait.For(t, "the layer to be asked for", func() bool {
		return slices.ContainsFunc(r.Requests(), func(q registry.Request) bool { return strings.HasSuffix(q.Path, layerDigest(a, 0)) })
	})
	repair := readOnly(t, n.cfg.Root)
	goOn()
	if err := <-ended; err == nil || errors.Is(err, fault.Internal) {
		t.Errorf("pull: %v", err)
	}
	if err := n.locks.Lost(); err != nil {
		t.Error(err)
	}
	repair()
	n.pull(r.Addr() + "/app:1")
	n.noDebris()
}

// When containers/storage has met the read-only disk all the same and lost a lock, the store
// says so, answers from memory, and asks for another process as soon as that could open it.
func TestLostLockIsNotReady(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "x"))
	cfg := n.cfg // of a store that cannot be closed properly, and not opened again in this process
	cfg.Root, cfg.RunRoot, cfg.StateDir = filepath.Join(n.dir, "root2"), filepath.Join(n.dir, "run2"), filepath.Join(n.dir, "state2")
	s, err := openStore(testContext(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	img, err := s.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(filepath.Join(cfg.Root, driverName), unix.MNT_DETACH) }) // the library's

	repair := readOnly(t, cfg.Root)
	if err := panics.Do(t.Context(), "list", func() error { _, err := s.store.Images(); return err }); !errors.Is(err, fault.Internal) {
		t.Fatalf("containers/storage no longer panics: %v", err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := s.AwaitLost(ended); err != nil {
		t.Errorf("wants to be restarted on a read-only disk: %v", err)
	}
	repair()
	if err := ends(t, "wait", s.AwaitLost); !errors.Is(err, fault.Unavailable) {
		t.Errorf("after the repair: %v", err)
	}
	if err := s.Ready(testContext(t)); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), cfg.Root) {
		t.Errorf("ready: %v", err)
	}
	if err := n.ready(); err != nil {
		t.Errorf("another store: %v", err)
	}
	for what, call := range map[string]func(ctx context.Context) error{
		"list":  func(ctx context.Context) error { _, err := s.Image(ctx, img.ID); return err },
		"usage": func(ctx context.Context) error { _, _, err := s.FsInfo(ctx); return err },
	} {
		if err := ends(t, what, call); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := ends(t, "remove", func(ctx context.Context) error { return s.Remove(ctx, img.ID) }); !errors.Is(err, fault.Unavailable) {
		t.Errorf("remove: %v", err)
	}
	if err := ends(t, "close", s.Close); !errors.Is(err, fault.Unavailable) {
		t.Errorf("close: %v", err)
	}
}

// A start on a read-only disk says so.
func TestOpenOnReadOnlyDisk(t *testing.T) {
	t.Parallel()
	n, _ := pulled(t, motd(t, "x"))
	if err := n.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	repair := readOnly(t, n.cfg.Root)
	err := ends(t, "open", func(ctx context.Context) error {
		s, err := openStore(ctx, n.cfg)
		if err == nil {
			err = s.Close(ctx)
		}
		return err
	})
	if !errors.Is(err, unix.EROFS) || !strings.Contains(err.Error(), n.cfg.Root) {
		t.Errorf("%v", err)
	}
	repair()
	n.open()
	if len(n.list()) != 1 {
		t.Error("the image is gone")
	}
}

// While the store cannot be locked, Close tries once and not for each image: they keep their
// records until the next start.
func TestCloseWithoutLocksTriesOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	const images = 3
	for i := range images {
		r := serve(t, "app", "1", motd(t, fmt.Sprint(i)))
		c := n.rootfs(fmt.Sprint(i), n.pull(r.Addr()+"/app:1").ID)
		n.mount(c)
		n.removeRootfs(c) // and is in its grace
	}
	n.locks.Panicked(&fs.PathError{Op: "open", Path: filepath.Join(n.cfg.Root, "storage.lock"), Err: unix.EIO})
	lost := n.locks.Lost()
	err := ends(t, "close", n.Close)
	if !errors.Is(err, lost) || strings.Count(err.Error(), lost.Error()) != 1 {
		t.Errorf("%v, want %v once", err, lost)
	}
	n.open()
	records, err := n.holds.records()
	if len(records) != images || err != nil {
		t.Errorf("%d images have a record, want %d, %v", len(records), images, err)
	}
	ok(t, n.Adopt(testContext(t), nil))
}
