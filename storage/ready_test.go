package storage

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/owner"
)

// onDisk is a node whose writable layers are on a disk of their own.
func onDisk(t *testing.T) (*node, *disk) {
	t.Helper()
	d := newDisk(t, 32)
	n := newNode(t, func(c *Options) { c.StateDir = filepath.Join(d.path, "state") })
	n.wantReady("new")
	return n, d
}

// ready returns the result of Ready for an attempt that begins now and ends, which may take longer
// on a busy machine than a call waits.
func (n *node) ready() error {
	n.t.Helper()
	if earlier := n.probe.underWay(); earlier != nil {
		<-earlier.done
	}
	<-n.probe.start(n.failing).done
	return n.Ready(testContext(n.t))
}

func (n *node) wantReady(when string) {
	n.t.Helper()
	if err := n.ready(); err != nil {
		n.t.Errorf("%s: %v", when, err)
	}
}

// wantNotReady: for the same reason, in the same words, each time.
func (n *node) wantNotReady(reason error, words ...string) {
	n.t.Helper()
	first := n.ready()
	if !errors.Is(first, reason) {
		n.t.Fatalf("%v, want %v", first, reason)
	}
	for _, word := range words {
		if !strings.Contains(first.Error(), word) {
			n.t.Errorf("%q does not say %q", first, word)
		}
	}
	if second := n.ready(); second == nil || second.Error() != first.Error() {
		n.t.Errorf("%v became %v", first, second)
	}
}

func (d *disk) remount(options string) {
	d.t.Helper()
	if out, err := exec.Command("mount", "-o", "remount,"+options, d.path).CombinedOutput(); err != nil {
		d.t.Fatalf("%v: %s", err, out)
	}
}

func TestReadOnlyDiskIsNotReady(t *testing.T) {
	t.Parallel()
	n, d := onDisk(t)
	d.remount("ro")
	n.wantNotReady(fault.Unavailable, n.containersDir, "read-only")
	d.remount("rw")
	n.wantReady("read-write again")
}

// A file system that has shut down after an error fails to write, and says so in no
// other way.
func TestFailingDiskIsNotReady(t *testing.T) {
	t.Parallel()
	n, d := onDisk(t)
	f, err := os.Open(d.path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.IoctlSetPointerInt(int(f.Fd()), 0x8004587D, 1); err != nil { // EXT4_IOC_SHUTDOWN, without a flush of the log
		t.Fatal(err)
	}
	n.probe.set(time.Time{}) // half a minute later
	n.wantNotReady(unix.EIO, n.containersDir)
}

// A full disk is DiskPressure's business (O7): neither blocks nor inodes count.
func TestFullDiskIsReady(t *testing.T) {
	t.Parallel()
	n, d := onDisk(t)
	d.fill()
	for i := 0; ; i++ {
		err := os.Mkdir(filepath.Join(d.path, "inode"+strings.Repeat("x", i)), 0o700)
		if err != nil {
			break
		}
	}
	n.probe.set(time.Time{})
	n.wantReady("full")
}

// Kubelets ask every few seconds, for ever: nothing is made and deleted for that.
func TestReadyChangesNoDirectory(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.wantReady("new")
	dirs := []string{n.store.GraphRoot(), n.containersDir}
	times := func() (all []time.Time) {
		for _, dir := range dirs {
			info, err := os.Stat(dir)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, info.ModTime())
		}
		return all
	}
	before, written := times(), n.probe.lastWritten()
	for range 3 {
		n.wantReady("again")
	}
	for i, after := range times() {
		if !after.Equal(before[i]) {
			t.Errorf("%s has changed", dirs[i])
		}
	}
	if n.probe.lastWritten() != written {
		t.Error("files were written again at once")
	}
	n.probe.set(time.Time{})
	n.wantReady("later")
	for i, after := range times() {
		if !after.Equal(before[i]) {
			t.Errorf("a write has changed %s", dirs[i])
		}
	}
}

// A disk that does not answer leaves the answer as it was, and one attempt behind.
func TestHungDiskStaysReady(t *testing.T) {
	t.Parallel()
	n, d := onDisk(t)
	n.probe.set(time.Time{})
	d.freeze()
	thawed := false
	defer func() {
		if !thawed {
			d.thaw()
		}
	}()
	if err := n.Ready(testContext(t)); err != nil {
		t.Errorf("hung: %v", err)
	}
	first := n.probe.underWay()
	if first == nil {
		t.Fatal("no attempt hangs")
	}
	if err := n.Ready(testContext(t)); err != nil {
		t.Errorf("hung for longer: %v", err)
	}
	if n.probe.underWay() != first {
		t.Error("another attempt was begun")
	}
	d.thaw()
	thawed = true
	<-first.done
	n.wantReady("thawed")
}

// What was found last counts while a disk hangs, whatever it was.
func TestHungProbeKeepsTheLastAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var p probe
		release := make(chan struct{})
		hang := func(bool) error { <-release; return nil }
		broken := func(bool) error { return unix.EIO }
		if err := p.look(t.Context(), broken); !errors.Is(err, unix.EIO) {
			t.Errorf("broken: %v", err)
		}
		began := time.Now()
		for range 3 {
			if err := p.look(t.Context(), hang); !errors.Is(err, unix.EIO) {
				t.Errorf("hangs: %v", err)
			}
		}
		if waited := time.Since(began); waited != readyWait {
			t.Errorf("three callers waited %s for one attempt, want %s", waited, readyWait)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := p.look(ctx, hang); !errors.Is(err, context.Canceled) && !errors.Is(err, unix.EIO) {
			t.Errorf("a caller that has gone: %v", err)
		}
		close(release)
		synctest.Wait()
		if err := p.look(t.Context(), hang); err != nil {
			t.Errorf("released: %v", err)
		}
	})
}

// A store that another crius has taken over is not ready, and its images stay untouched.
func TestStoreTakenIsNotReady(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	path := filepath.Join(n.store.GraphRoot(), ownerName)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	n.wantReady("without a lock file")
	other := t.TempDir()
	if err := os.MkdirAll(filepath.Join(other, "pods", strings.Repeat("a", 64)), 0o700); err != nil {
		t.Fatal(err)
	}
	lock, err := owner.Take(t.Context(), path, other, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	n.wantNotReady(fault.Precondition, other, "image.root")
	if err := n.MountRootfs(testContext(t), n.rootfs("c", img.ID)); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), other) {
		t.Errorf("mount: %v", err)
	}
	if err := n.Remove(testContext(t), img.ID); !errors.Is(err, fault.Precondition) {
		t.Errorf("remove: %v", err)
	}
	if err := os.RemoveAll(filepath.Join(other, "pods")); err != nil {
		t.Fatal(err)
	}
	n.wantReady("the other one has gone")
}

// set moves the time at which a file was last made.
func (p *probe) set(written time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.written = written
}

func (p *probe) lastWritten() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.written
}

func (p *probe) underWay() *attempt {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.current
}
