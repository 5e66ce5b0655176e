package storage

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
)

// ext4 mounts an ext4 file system of 64 MiB, made and mounted with options, if the kernel
// can mount that.
func ext4(t *testing.T, features string, options ...string) (dir string, ok bool) {
	t.Helper()
	file, dir := filepath.Join(t.TempDir(), "disk"), t.TempDir()
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, 64<<20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "mkfs.ext4", "-q", "-I", "256", "-O", features, file).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	options = append(options, "loop")
	if err := exec.CommandContext(t.Context(), "mount", "-o", strings.Join(options, ","), file, dir).Run(); err != nil {
		return "", false
	}
	t.Cleanup(func() {
		if err := mount.Unmount(dir); err != nil { // which frees the loop device
			t.Error(err)
		}
	})
	return dir, true
}

// If the kernel has project quotas, a container that fills its writable layer is stopped, another
// is not, and the usage of both is counted. If it has none, a store with a limit is refused, and
// the error says what to do.
func TestWritableLayerQuota(t *testing.T) {
	t.Parallel()
	const limit = 4 << 20
	limited := func(dir string) func(*Options) {
		return func(o *Options) { o.StateDir, o.WritableSize = filepath.Join(dir, "state"), limit }
	}
	if dir, ok := ext4(t, "quota,project", "prjquota"); ok {
		if err := (&Options{StateDir: dir}).CheckLayerSizes(); err != nil {
			t.Errorf("a disk with project quotas: %v", err)
		}
		testQuota(t, newNode(t, limited(dir)), limit)
		return
	}
	dir, ok := ext4(t, "^has_journal")
	if !ok {
		t.Fatal("cannot mount an ext4 file system at all")
	}
	if err := (&Options{StateDir: dir}).CheckLayerSizes(); !errors.Is(err, fault.Precondition) {
		t.Errorf("a disk without project quotas: %v", err)
	}
	n := newNode(t, func(o *Options) { o.StateDir = filepath.Join(dir, "unlimited") })
	asking := n.rootfs("asking", n.pull(serve(t, "app", "1", motd(t, "x")).Addr()+"/app:1").ID)
	asking.WritableSize = limit
	if err := n.MountRootfs(t.Context(), asking); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "has no project quotas") {
		t.Errorf("a container that asks for a limit: %v", err)
	}
	n.removeRootfs(asking)
	options := newNode(t).cfg
	limited(dir)(&options)
	s, err := openStore(t.Context(), options)
	if err == nil {
		err = errors.Join(errors.New("opened"), s.Close(t.Context()))
	}
	if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "the ext4 file system mounted at "+dir+" has no project quotas; mount XFS with pquota") {
		t.Error(err)
	}
}

func testQuota(t *testing.T, n *node, limit int) {
	img := n.pull(serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1")
	full, other := n.rootfs("full", img.ID), n.rootfs("other", img.ID)
	other.UserNS = userNS(t, 100000)
	for _, r := range []Rootfs{full, other} {
		n.mount(r)
		// A file of the image is copied up in one directory and moved to the other.
		if err := os.WriteFile(filepath.Join(r.Target, "etc/motd"), []byte("changed"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	err := os.WriteFile(filepath.Join(full.Target, "large"), make([]byte, 2*limit), 0o600)
	if !fault.DiskFull(err) {
		t.Errorf("twice the limit: %v", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(full.Target, &st); err != nil || st.Blocks*uint64(st.Bsize) != uint64(limit) {
		t.Errorf("statfs in the container: %+v, %v", st, err)
	}
	if err := os.WriteFile(filepath.Join(other.Target, "file"), make([]byte, limit/2), 0o600); err != nil {
		t.Errorf("another container: %v", err)
	}
	for _, r := range []Rootfs{full, other} {
		usage, err := n.RootfsUsage(r)
		if err != nil || usage.UsedBytes < uint64(limit/2) || usage.UsedBytes > uint64(limit) {
			t.Errorf("usage of %s: %+v, %v", r.ID, usage, err)
		}
	}
	n.restart()
	if err := n.UnmountRootfs(full); err != nil {
		t.Error(err)
	}
	n.mount(full) // with its project
	if err := os.WriteFile(filepath.Join(full.Target, "more"), make([]byte, limit), 0o600); !fault.DiskFull(err) {
		t.Errorf("after a restart: %v", err)
	}
	n.removeRootfs(full)
	n.removeRootfs(other)
	again := n.rootfs("again", img.ID)
	n.mount(again)
	if err := os.WriteFile(filepath.Join(again.Target, "file"), make([]byte, limit/2), 0o600); err != nil {
		t.Errorf("the space of removed containers: %v", err)
	}
	n.removeRootfs(again)
	testQuotaOfContainer(t, n, img.ID, limit)
}

// testQuotaOfContainer has containers ask for less and for more than the others have.
func testQuotaOfContainer(t *testing.T, n *node, image string, limit int) {
	for id, size := range map[string]int{"less": limit / 2, "more": 2 * limit} {
		r := n.rootfs(id, image)
		r.WritableSize = int64(size)
		n.mount(r)
		if err := os.WriteFile(filepath.Join(r.Target, "fits"), make([]byte, size/2), 0o600); err != nil {
			t.Errorf("%s: half of the size: %v", id, err)
		}
		n.restart()
		if err := os.WriteFile(filepath.Join(r.Target, "large"), make([]byte, size), 0o600); !fault.DiskFull(err) {
			t.Errorf("%s: more than the size, after a restart: %v", id, err)
		}
		if usage, err := n.RootfsUsage(r); err != nil || usage.UsedBytes < uint64(size/2) || usage.UsedBytes > uint64(size) {
			t.Errorf("%s: usage %+v, %v", id, usage, err)
		}
		if fs, err := n.WritableSize(); err != nil || fs.Bytes < 32<<20 {
			t.Errorf("%s: the file system of all layers counts as %+v, %v", id, fs, err)
		}
		n.removeRootfs(r)
	}
}

// storage.conf's overlay.size is the same limit, whose refusal by containers/storage on
// ext4 nobody sees.
func TestOverlaySize(t *testing.T) {
	t.Parallel()
	options := newNode(t).cfg
	options.Root, options.RunRoot, options.StateDir = t.TempDir(), t.TempDir(), "/proc/none"
	options.Options = append(options.Options, "overlay.size=1G")
	if _, err := openStore(context.Background(), options); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "the proc file system mounted at /proc has no project quotas") {
		t.Error(err)
	}
	options.StateDir = "" // no layers are made
	s, err := openStore(context.Background(), options)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Error(err)
	}
}
