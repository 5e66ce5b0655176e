package download

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"
	"golang.org/x/sys/unix"
)

// onDisk is a directory on a disk of 4 MiB.
func onDisk(t *testing.T) *Dir {
	t.Helper()
	mounted := t.TempDir()
	if err := unix.Mount("tmpfs", mounted, "tmpfs", 0, "size=4m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(mounted, unix.MNT_DETACH) })
	d := In(mounted)
	d.Limits.Share = 1
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// fill writes a file of size bytes, without holes.
func fill(t *testing.T, d *Dir, name string, size int) {
	t.Helper()
	write(t, d, name, 0, 0)
	if err := os.WriteFile(pathOf(d, name), make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
}

func sized(name string, size int64) (info types.BlobInfo, file string) {
	info = types.BlobInfo{Digest: digest.FromString(name), Size: size}
	return info, fileName(info.Digest, "registry.test")
}

// The missing bytes must fit into the free space and the files that Clear would delete. Those stay,
// and nothing is made.
func TestFits(t *testing.T) {
	t.Parallel()
	const mega = 1 << 20
	for name, test := range map[string]struct {
		own, others, beside int   // bytes that are here
		size                int64 // of a blob
		fits                bool
	}{
		"free":                      {size: 4 * mega, fits: true},
		"more than free":            {size: 4*mega + 1},
		"its own beginning":         {own: 3 * mega, size: 4 * mega, fits: true},
		"its own beginning, once":   {own: 3 * mega, size: 4*mega + 1},
		"those of others":           {others: 3 * mega, size: 4 * mega, fits: true},
		"those of images":           {beside: 3 * mega, size: 4 * mega, fits: true},
		"both":                      {own: mega, others: mega, beside: mega, size: 4 * mega, fits: true},
		"more than there would be":  {own: mega, others: mega, beside: mega, size: 4*mega + 1},
		"a size that no disk has":   {own: mega, others: mega, beside: mega, size: 1 << 62},
		"less than what is there":   {own: mega, size: 10, fits: true},
		"those of others, too many": {others: 3 * mega, size: 5 * mega},
	} {
		d := onDisk(t)
		beside := In(filepath.Join(d.parent, "images"))
		t.Cleanup(func() { _ = beside.Close() })
		d.Beside = beside
		info, own := sized("own", test.size)
		for _, f := range []struct {
			dir  *Dir
			name string
			size int
		}{{d, own, test.own}, {d, "other", test.others}, {beside, "image", test.beside}} {
			if f.size > 0 {
				fill(t, f.dir, f.name, f.size)
			}
		}
		before := [][]string{names(t, d), names(t, beside)}
		another, _ := sized("another", 0)
		pull := d.Begin("registry.test")
		if fits, err := pull.Fits([]types.BlobInfo{info, another}); fits != test.fits || err != nil {
			t.Errorf("%s: fits: %t, %v", name, fits, err)
		}
		for i, dir := range []*Dir{d, beside} {
			if left := names(t, dir); !slices.Equal(left, before[i]) {
				t.Errorf("%s: left: %q, want %q", name, left, before[i])
			}
		}
	}
}

// What a pull counts on is not deleted before it ends.
func TestWhatFitsStays(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	info, own := sized("own", 100)
	write(t, d, own, 10, 0)
	write(t, d, "other", 10, 0)
	pulls := []*Pull{d.Begin("registry.test"), d.Begin("registry.test")}
	for _, pull := range pulls {
		if fits, err := pull.Fits([]types.BlobInfo{info}); !fits || err != nil {
			t.Fatal(fits, err)
		}
	}
	for i, want := range [][]string{{own}, {own}, nil} {
		if d.Clear(); !slices.Equal(names(t, d), want) {
			t.Errorf("left: %q, want %q", names(t, d), want)
		}
		if i < len(pulls) {
			pulls[i].End(nil)
		}
	}
}

// Nor does the pull take it along that has used it before.
func TestWhatFitsOutlastsOtherPulls(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	waits := d.Begin("registry.test")
	if fits, err := waits.Fits([]types.BlobInfo{info}); !fits || err != nil {
		t.Fatal(fits, err)
	}
	if _, err := pullOne(t.Context(), d, &fake{content: content}, info); err != nil {
		t.Fatal(err)
	}
	src := &fake{content: content}
	err := waits.Fetch(t.Context(), src, info, new(watched).watcher())
	waits.End(err)
	if err != nil || src.sent != 1 || len(names(t, d)) > 0 {
		t.Errorf("%d bytes were sent, left: %q, %v", src.sent, names(t, d), err)
	}
}

// A pull that could only fill the disk with another copy waits for one that gets nothing.
func TestNoRoomForAnotherCopy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := onDisk(t)
		d.Patience = time.Second
		content, info := blob(t)
		if err := os.WriteFile(filepath.Join(d.parent, "full"), make([]byte, 3<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		first, firstDone := holding(ctx, t, d, content, info)
		second := &fake{content: content}
		secondDone := inBackground(t.Context(), d, second, info)
		time.Sleep(time.Minute)
		if used := users(d, info); used != 2 {
			t.Errorf("%d pulls use the file", used)
		}
		cancel()
		<-firstDone
		if got := <-secondDone; got.err != nil || first.sent+second.sent != info.Size {
			t.Errorf("%d and %d bytes were sent, %v", first.sent, second.sent, got.err)
		}
	})
}

// What is on another disk makes no room, and stays.
func TestAnotherDisk(t *testing.T) {
	t.Parallel()
	d, same, other := newDir(t), newDir(t), onDisk(t)
	write(t, same, "same", 10, 0)
	write(t, other, "other", 10, 0)
	for beside, cleared := range map[*Dir]bool{same: true, other: false} {
		d.Beside = beside
		if d.Clear() != cleared || len(names(t, beside)) == 0 != cleared {
			t.Errorf("%s: left: %q", beside.parent, names(t, beside))
		}
	}
}
