package download

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/test/kit/wait"
)

// blob returns a blob of some chunks, and its description in a manifest.
func blob(t *testing.T) ([]byte, types.BlobInfo) {
	t.Helper()
	content := make([]byte, 3*chunk+1000)
	_, _ = rand.NewChaCha8([32]byte{byte(len(t.Name()))}).Read(content)
	return content, types.BlobInfo{Digest: digest.FromBytes(content), Size: int64(len(content))}
}

var errCut, errDenied = errors.New("connection cut"), errors.New("denied")

// fake is a registry, with faults.
type fake struct {
	content    []byte
	cut        int           // bytes after which an answer breaks, if there are more; 0: none
	last       int           // 1: one answer is left, -1: none is; 0: no end
	hold       chan struct{} // is waited for after that instead, or the end of the pull
	holds      func()        // is called before
	rangeErr   error         // refuses parts
	part       []byte        // is sent as any part, whatever was asked for
	denied     bool
	sent       int64 // bytes
	wholes     int   // answers
	resumedHad int64
}

func (*fake) Mirrored() bool { return false }
func (*fake) Answer() string { return "the answer" }

func (f *fake) Guard(_ context.Context, _ types.BlobInfo, stream io.ReadCloser) io.ReadCloser {
	return stream
}

func (f *fake) Whole(ctx context.Context, _ types.BlobInfo) (io.ReadCloser, error) {
	if f.denied {
		return nil, errDenied
	}
	if f.away() {
		return nil, errCut
	}
	f.wholes++
	return f.answer(ctx, f.content), nil
}

func (f *fake) Part(ctx context.Context, _ types.BlobInfo, from, _ int64) (io.ReadCloser, error) {
	if f.denied {
		return nil, errDenied
	}
	if f.away() {
		return nil, errCut
	}
	if f.rangeErr != nil {
		return nil, f.rangeErr
	}
	f.resumedHad = from
	rest := f.content[from:]
	if f.part != nil {
		rest = f.part
	}
	return f.answer(ctx, rest), nil
}

// away counts a request, and reports whether it gets no answer.
func (f *fake) away() bool {
	away := f.last < 0
	f.last = -max(f.last, -f.last)
	return away
}

func (f *fake) answer(ctx context.Context, rest []byte) io.ReadCloser {
	end := io.EOF
	if f.cut > 0 && f.cut < len(rest) {
		rest, end = rest[:f.cut], errCut
	}
	return io.NopCloser(&answer{f, ctx, rest, end})
}

type answer struct {
	of   *fake
	ctx  context.Context
	left []byte
	end  error
}

func (a *answer) Read(p []byte) (int, error) {
	n := copy(p, a.left)
	a.left = a.left[n:]
	a.of.sent += int64(n)
	if n > 0 {
		return n, nil
	}
	if a.of.holds != nil {
		a.of.holds()
	}
	if a.of.hold != nil {
		select {
		case <-a.of.hold:
		case <-a.ctx.Done():
			return 0, a.ctx.Err()
		}
	}
	return 0, a.end
}

// watched is what a Watcher has observed.
type watched struct {
	resumed, came int64
	connections   atomic.Int64
	sizes         []int64
	content       []byte
}

func (w *watched) watcher() Watcher {
	return Watcher{
		Begins: func() {}, Resumed: func(n int64) { w.resumed += n }, Came: func(n int64) { w.came += n },
		Connections: func(change int) { w.connections.Add(int64(change)) },
		Shown: func(file *os.File, size int64) error {
			w.sizes = append(w.sizes, size)
			content := make([]byte, size)
			_, err := file.ReadAt(content, 0)
			w.content = content
			return err
		},
	}
}

// pullOne is a pull of one blob.
func pullOne(ctx context.Context, d *Dir, src *fake, info types.BlobInfo) (*watched, error) {
	w := new(watched)
	pull := d.Begin("registry.test")
	err := pull.Fetch(ctx, src, info, w.watcher())
	pull.End(err)
	return w, err
}

func names(t *testing.T, d *Dir) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(d.parent, Name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func newDir(t *testing.T) *Dir {
	t.Helper()
	d := In(t.TempDir())
	d.Limits.Share = 1
	d.Patience = time.Hour
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func pathOf(d *Dir, name string) string { return filepath.Join(d.parent, file(name)) }

// A blob that is not here is shown while it comes, and nothing of it stays.
func TestFetch(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	src := &fake{content: content}
	got, err := pullOne(t.Context(), d, src, info)
	if err != nil || !bytes.Equal(got.content, content) {
		t.Fatalf("%d bytes, %v", len(got.content), err)
	}
	if want := []int64{chunk, 2 * chunk, 3 * chunk, info.Size}; !slices.Equal(got.sizes, want) {
		t.Errorf("shown %d, want %d", got.sizes, want)
	}
	if got.came != info.Size || got.resumed != 0 {
		t.Errorf("%d bytes came, %d were here", got.came, got.resumed)
	}
	if left := names(t, d); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// What has come before a pull was cut is not fetched again, however often that happens. It
// is shown when all of it is known to be right.
func TestResume(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	src := &fake{content: content, cut: chunk + 10}
	for range 2 {
		src.last = 1
		if _, err := pullOne(t.Context(), d, src, info); !errors.Is(err, errCut) {
			t.Fatal(err)
		}
	}
	if info, err := os.Stat(pathOf(d, names(t, d)[0])); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	src.cut, src.last = 0, 0
	got, err := pullOne(t.Context(), In(d.parent), src, info) // another process
	if err != nil || !bytes.Equal(got.content, content) {
		t.Fatalf("%d bytes, %v", len(got.content), err)
	}
	if src.sent != info.Size || src.wholes != 1 {
		t.Errorf("%d bytes were sent of %d, %d answers were whole", src.sent, info.Size, src.wholes)
	}
	if got.resumed != 2*chunk+20 || got.came != info.Size-got.resumed || !slices.Equal(got.sizes, []int64{info.Size}) {
		t.Errorf("%d bytes were here, %d came, shown %d", got.resumed, got.came, got.sizes)
	}
	if left := names(t, d); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// A process that is forked during a pull has copies of its files until it executes its program. They
// keep nobody from resuming.
func TestForkDoesNotKeepTheDownload(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	src := &fake{content: content, cut: chunk + 10, last: 1}
	var forked []int
	defer func() {
		for _, fd := range forked {
			_ = unix.Close(fd)
		}
	}()
	src.holds = func() {
		for _, p := range d.named {
			fd, err := unix.FcntlInt(p.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				t.Error(err)
			}
			forked = append(forked, fd)
		}
	}
	if _, err := pullOne(t.Context(), d, src, info); !errors.Is(err, errCut) || len(forked) == 0 {
		t.Fatalf("%v, with %d copies", err, len(forked))
	}
	src.cut, src.last = 0, 0
	if got, err := pullOne(t.Context(), d, src, info); err != nil || got.resumed != chunk+10 {
		t.Errorf("%d bytes were here, %v", got.resumed, err)
	}
	if left := names(t, d); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// A file that cannot be continued, for whatever reason, is replaced.
func TestResumeIsImpossible(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		stored func(content []byte) []byte
		change func(*fake)
	}{
		"damaged":           {func(c []byte) []byte { c[5] ^= 1; return c[:chunk] }, nil},
		"torn":              {func(c []byte) []byte { clear(c[100:]); return c[:chunk] }, nil},
		"whole and damaged": {func(c []byte) []byte { c[5] ^= 1; return c }, nil},
		"its end damaged":   {func(c []byte) []byte { c[len(c)-1] ^= 1; return c }, nil},
		"too long":          {func(c []byte) []byte { return append(c, 0) }, nil},
		"no parts":          {func(c []byte) []byte { return c[:chunk] }, func(f *fake) { f.rangeErr = errors.ErrUnsupported }},
		"wrong part":        {func(c []byte) []byte { return c[:chunk] }, func(f *fake) { f.part = f.content[:len(f.content)-chunk] }},
		"short part":        {func(c []byte) []byte { return c[:chunk] }, func(f *fake) { f.part = f.content[chunk : 2*chunk] }},
		"empty part":        {func(c []byte) []byte { return c[:chunk] }, func(f *fake) { f.part = []byte{} }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDir(t)
			content, info := blob(t)
			src := &fake{content: content}
			if test.change != nil {
				test.change(src)
			}
			if err := os.Mkdir(filepath.Join(d.parent, Name), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(pathOf(d, fileName(info.Digest, "registry.test")), test.stored(bytes.Clone(content)), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := pullOne(t.Context(), d, src, info)
			if err != nil || !bytes.Equal(got.content, content) || src.wholes != 1 {
				t.Errorf("%d bytes, %d whole answers, %v", len(got.content), src.wholes, err)
			}
			if len(got.sizes) == 0 || got.sizes[0] != chunk {
				t.Errorf("shown %d", got.sizes)
			}
		})
	}
}

// Content that has another digest or size is neither passed on as whole nor kept.
func TestWrongContent(t *testing.T) {
	t.Parallel()
	content, info := blob(t)
	for name, sent := range map[string][]byte{
		"other": append([]byte{content[0] ^ 1}, content[1:]...),
		"short": content[:chunk],
	} {
		d := newDir(t)
		if _, err := pullOne(t.Context(), d, &fake{content: sent}, info); !errors.Is(err, ErrDiffers) {
			t.Errorf("%s: %v", name, err)
		}
		if left := names(t, d); len(left) > 0 {
			t.Errorf("%s: left: %q", name, left)
		}
	}
}

// A pull gets a blob that is there only if the registry sends it a byte of it. A pull that gets
// none takes nothing from others.
func TestOthersBytesAreEarned(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	keeps := d.Begin("registry.test")
	if err := keeps.Fetch(t.Context(), &fake{content: content}, info, new(watched).watcher()); err != nil {
		t.Fatal(err)
	}
	keeps.End(fault.Unavailable)
	got, err := pullOne(t.Context(), d, &fake{content: content, denied: true}, info)
	if !errors.Is(err, errDenied) || len(got.sizes) > 0 {
		t.Errorf("shown %d, %v", got.sizes, err)
	}
	src := &fake{content: content}
	got, err = pullOne(t.Context(), d, src, info)
	if err != nil || !bytes.Equal(got.content, content) || src.sent != 1 || src.wholes != 0 {
		t.Errorf("%d bytes, of which %d were sent, %v", len(got.content), src.sent, err)
	}
}

// What a pull has been shown stays as it is, whatever the registry sends another one.
func TestShownBytesStay(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	var shown *os.File
	first := d.Begin("registry.test")
	err := first.Fetch(t.Context(), &fake{content: content}, info, Watcher{
		Begins: func() {}, Resumed: func(int64) {}, Came: func(int64) {}, Connections: func(int) {},
		Shown: func(file *os.File, _ int64) (err error) {
			if shown == nil {
				shown, err = os.Open(pathOf(d, filepath.Base(file.Name())))
			}
			return err
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer shown.Close()
	if _, err := pullOne(t.Context(), d, &fake{content: make([]byte, len(content))}, info); !errors.Is(err, ErrDiffers) {
		t.Error(err)
	}
	got := make([]byte, len(content))
	if _, err := shown.ReadAt(got, 0); err != nil || !bytes.Equal(got, content) {
		t.Errorf("the first pull's file has changed, %v", err)
	}
	first.End(nil)
	if left := names(t, d); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// result is the result of a fetch in the background.
type result struct {
	*watched
	err error
}

func inBackground(ctx context.Context, d *Dir, src *fake, info types.BlobInfo) <-chan result {
	done := make(chan result, 1)
	go func() {
		w, err := pullOne(ctx, d, src, info)
		done <- result{w, err}
	}()
	return done
}

// holding begins a fetch that waits after some bytes.
func holding(ctx context.Context, t *testing.T, d *Dir, content []byte, info types.BlobInfo) (*fake, <-chan result) {
	t.Helper()
	src := &fake{content: content, cut: 2 * chunk, hold: make(chan struct{})}
	done := inBackground(ctx, d, src, info)
	wait.For(t, "bytes to come", func() bool {
		entries := names(t, d)
		if len(entries) == 0 {
			return false
		}
		stat, err := os.Stat(pathOf(d, entries[0]))
		return err == nil && stat.Size() == 2*chunk
	})
	return src, done
}

func users(d *Dir, info types.BlobInfo) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.named[fileName(info.Digest, "registry.test")].users
}

// A second pull waits for the first one, and continues where that ends.
func TestPullsShareADownload(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	ctx, cancel := context.WithCancel(t.Context())
	first, firstDone := holding(ctx, t, d, content, info)
	second := &fake{content: content}
	secondDone := inBackground(t.Context(), d, second, info)
	wait.For(t, "the second pull", func() bool { return users(d, info) == 2 })
	cancel()
	if got := <-firstDone; !errors.Is(got.err, context.Canceled) {
		t.Errorf("first pull: %v", got.err)
	}
	if got := <-secondDone; got.err != nil || !bytes.Equal(got.content, content) || first.sent+second.sent != info.Size {
		t.Errorf("second pull: %d bytes, %d and %d were sent, %v", len(got.content), first.sent, second.sent, got.err)
	}
	if left := names(t, d); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// The last to let go of a download may be a pull that was called off, when another one has
// made a layer of it.
func TestDownloadThatIsDoneWithIsNotKept(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	ctx, cancel := context.WithCancel(t.Context())
	late, ended := d.Begin("registry.test"), make(chan error, 1)
	src := &fake{content: content, cut: 2 * chunk, hold: make(chan struct{})}
	go func() { ended <- late.Fetch(ctx, src, info, new(watched).watcher()) }()
	wait.For(t, "a download", func() bool { return len(names(t, d)) == 1 })
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if _, err := pullOne(t.Context(), d, &fake{content: content}, info); err != nil {
		t.Fatal(err)
	}
	if left := names(t, d); len(left) != 1 {
		t.Errorf("while one pull has not let go: %q", left)
	}
	late.End(context.Canceled)
	if left := names(t, d); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// A pull waits neither for another registry, nor for one that sends nothing, nor for another
// process.
func TestPullsThatDoNotWait(t *testing.T) {
	t.Parallel()
	const long = time.Hour
	for name, second := range map[string]struct {
		patience time.Duration
		registry string
		dir      func(first *Dir) *Dir
	}{
		"another registry": {long, "other.test", func(d *Dir) *Dir { return d }},
		"stuck":            {time.Millisecond, "registry.test", func(d *Dir) *Dir { return d }},
		"another process":  {long, "registry.test", func(d *Dir) *Dir { return In(d.parent) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDir(t)
			d.Patience = second.patience
			content, info := blob(t)
			_, done := holding(t.Context(), t, d, content, info)
			w := new(watched)
			pull := second.dir(d).Begin(second.registry)
			err := pull.Fetch(t.Context(), &fake{content: content}, info, w.watcher())
			pull.End(err)
			if err != nil || !bytes.Equal(w.content, content) {
				t.Errorf("%d bytes, %v", len(w.content), err)
			}
			select {
			case got := <-done:
				t.Errorf("the first pull has ended: %v", got.err)
			default:
			}
			if left := names(t, d); len(left) != 1 {
				t.Errorf("files %q, want that of the first pull", left)
			}
		})
	}
}

// What a registry sends no more of is not asked for in the same way again.
func TestStalledResumeIsNotRepeated(t *testing.T) {
	t.Parallel()
	for cause, kept := range map[error][]int{progress.ErrStalled: {1, 0}, context.Canceled: {1, 1}} {
		d := newDir(t)
		content, info := blob(t)
		if _, err := pullOne(t.Context(), d, &fake{content: content, cut: chunk}, info); !errors.Is(err, errCut) {
			t.Fatal(err)
		}
		for i, want := range kept {
			ctx, cancel := context.WithCancelCause(t.Context())
			src := &fake{content: content, part: []byte{}, hold: make(chan struct{})}
			src.holds = func() { cancel(cause) }
			if _, err := pullOne(ctx, d, src, info); err == nil {
				t.Error("no error")
			}
			if left := names(t, d); len(left) != want {
				t.Errorf("%v, time %d: left: %q", cause, i+1, left)
			}
		}
	}
}

// If a registry is away for a while, the download is kept; if it then still sends no parts, it is
// asked for the whole blob.
func TestRangesFail(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	src := &fake{content: content, cut: 2 * chunk}
	cutPull := func() {
		t.Helper()
		src.last = 1
		if _, err := pullOne(t.Context(), d, src, info); !errors.Is(err, errCut) {
			t.Fatal(err)
		}
		src.last = 0
	}
	away := func() {
		t.Helper()
		src.rangeErr = fault.Unavailable
		if _, err := pullOne(t.Context(), d, src, info); !errors.Is(err, fault.Unavailable) || src.wholes != 1 {
			t.Errorf("%d whole answers, %v", src.wholes, err)
		}
		src.rangeErr = nil
	}
	cutPull()
	away()
	src.cut = 100
	cutPull() // a part comes, so that all is well
	away()
	src.cut, src.rangeErr = 0, fault.Unavailable
	if got, err := pullOne(t.Context(), d, src, info); err != nil || src.wholes != 2 || !bytes.Equal(got.content, content) {
		t.Errorf("%d bytes, %d whole answers, %v", len(got.content), src.wholes, err)
	}
}

// A connection that breaks time and again is made again within a pull, and each byte is
// counted once.
func TestReconnect(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	src := &fake{content: content, cut: chunk}
	if _, err := pullOne(t.Context(), d, src, info); !errors.Is(err, errCut) {
		t.Fatal(err)
	}
	got, err := pullOne(t.Context(), d, src, info)
	if err != nil || got.resumed != chunk {
		t.Errorf("%d bytes resumed, %v", got.resumed, err)
	}
	if !bytes.Equal(got.content, content) || src.sent != info.Size || got.came != info.Size-chunk || src.wholes != 1 {
		t.Errorf("%d bytes, %d were sent, %d came, %d whole answers", len(got.content), src.sent, got.came, src.wholes)
	}
}

// A pull that must fail again keeps nothing, and a full disk is cleared.
func TestEnd(t *testing.T) {
	t.Parallel()
	content, info := blob(t)
	for err, kept := range map[error]int{
		fault.Unavailable: 2, context.Canceled: 2, errors.New("unclear"): 2, fault.Invalid: 1, fault.Exhausted: 1, unix.ENOSPC: 0, nil: 1,
	} {
		d := newDir(t)
		write(t, d, "another", 10, 0)
		pull := d.Begin("registry.test")
		if err := pull.Fetch(t.Context(), &fake{content: content}, info, new(watched).watcher()); err != nil {
			t.Fatal(err)
		}
		pull.End(err)
		if left := names(t, d); len(left) != kept {
			t.Errorf("%v: left: %q", err, left)
		}
	}
}

func write(t *testing.T, d *Dir, name string, size int64, age time.Duration) {
	t.Helper()
	when := time.Now().Add(-age)
	err := errors.Join(os.MkdirAll(filepath.Join(d.parent, Name), 0o700), os.WriteFile(pathOf(d, name), nil, 0o600), os.Truncate(pathOf(d, name), size), os.Chtimes(pathOf(d, name), when, when))
	if err != nil {
		t.Fatal(err)
	}
}

// The oldest files go first, until the limits hold.
func TestSweep(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*Dir)
		want   []string
	}{
		"none":           {func(*Dir) {}, []string{"1", "2", "3"}},
		"age":            {func(d *Dir) { d.Limits.Age = 150 * time.Minute }, []string{"1", "2"}},
		"wrong clock":    {func(d *Dir) { write(t, d, "3", 1, -48*time.Hour) }, []string{"1", "2"}},
		"number":         {func(d *Dir) { d.Limits.Files = 1 }, []string{"1"}},
		"bytes":          {func(d *Dir) { d.Limits.Share = 1 << 40 }, nil},
		"large one":      {func(d *Dir) { room, _ := d.read(func([]os.DirEntry) {}); write(t, d, "3", room+1<<30, 3*time.Hour) }, []string{"1", "2"}}, // other tests may free some room
		"in use":         {func(d *Dir) { d.Limits.Files = 0; d.named["2"] = &part{} }, []string{"2"}},
		"empty ones":     {func(d *Dir) { d.Limits.Files = 3; write(t, d, "0", 0, 0) }, []string{"1", "2", "3"}},
		"unpacked":       {func(d *Dir) { d.Limits.Files = 0; d.named["2"] = &part{unpacked: true} }, nil},
		"no plain files": {func(d *Dir) { d.Limits.Files = 1; _ = os.MkdirAll(pathOf(d, "4/5"), 0o700) }, []string{"1"}},
		"far too many": {func(d *Dir) {
			d.Limits.Files = 2
			for i := range 2*batch + 1 {
				write(t, d, fmt.Sprint(i+4), 1, time.Duration(i+4)*time.Hour/1000)
			}
		}, []string{"4", "5"}},
	} {
		d := newDir(t)
		for i := range 3 {
			write(t, d, fmt.Sprint(i+1), 10, time.Duration(i+1)*time.Hour)
		}
		test.change(d)
		d.Sweep()
		if left := names(t, d); !slices.Equal(left, test.want) {
			t.Errorf("%s: left: %q, want %q", name, left, test.want)
		}
	}
}

// The files of layers that are in the store go as soon as there are too many, and until then the directory
// is not read for each.
func TestSweepOfUnpackedFiles(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	d.Limits.Files = 2
	var parts []*part
	for i := range 3 {
		p, err := d.open(types.BlobInfo{Digest: digest.FromString(fmt.Sprint(i)), Size: 1}, "registry.test")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.file.WriteString("x"); err != nil {
			t.Fatal(err)
		}
		parts = append(parts, p)
	}
	d.unpacked(parts[0])
	write(t, d, "empty", 0, 0)
	d.unpacked(parts[1])
	if left := names(t, d); len(left) != 4 {
		t.Errorf("left after two: %q", left)
	}
	d.unpacked(parts[2])
	if left := names(t, d); len(left) != 2 || slices.Contains(left, "empty") {
		t.Errorf("left after three: %q", left)
	}
	d.release(parts, nil, false, true)
	if left := names(t, d); len(left) != 0 {
		t.Errorf("left at the end: %q", left)
	}
}

// A file that has become too old is deleted without a pull.
func TestSweepByTime(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	d.Limits.Age = time.Hour
	write(t, d, "old", 1, time.Hour-time.Millisecond)
	d.Sweep()
	wait.For(t, "the file to go", func() bool { return len(names(t, d)) == 0 })
}

// What lies in the place of a file, and where a symbolic link leads, is not used.
func TestHostilePlaces(t *testing.T) {
	t.Parallel()
	for name, place := range map[string]func(path, elsewhere string) error{
		"directory": func(path, _ string) error { return os.MkdirAll(filepath.Join(path, "below"), 0o700) },
		"link":      func(path, elsewhere string) error { return os.Symlink(elsewhere, path) },
		"fifo":      func(path, _ string) error { return unix.Mkfifo(path, 0o600) },
	} {
		d := newDir(t)
		content, info := blob(t)
		elsewhere := filepath.Join(t.TempDir(), "file")
		if err := errors.Join(os.WriteFile(elsewhere, []byte("secret"), 0o600), os.Mkdir(filepath.Join(d.parent, Name), 0o700), place(pathOf(d, fileName(info.Digest, "registry.test")), elsewhere)); err != nil {
			t.Fatal(err)
		}
		if got, err := pullOne(t.Context(), d, &fake{content: content}, info); err != nil || !bytes.Equal(got.content, content) {
			t.Errorf("%s: %d bytes, %v", name, len(got.content), err)
		}
		if kept, err := os.ReadFile(elsewhere); err != nil || string(kept) != "secret" {
			t.Errorf("%s: the file elsewhere has %d bytes, %v", name, len(kept), err)
		}
	}
	if _, err := pullOne(t.Context(), newDir(t), &fake{}, types.BlobInfo{Digest: "sha256:../../x", Size: 1}); err == nil {
		t.Error("a digest that is a path was taken")
	}
}

// A link in the place of the directory leads neither downloads nor sweeps elsewhere.
func TestHostileDirectory(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	elsewhere := newDir(t)
	write(t, elsewhere, "file", 10, 1000*time.Hour)
	if err := os.Symlink(filepath.Join(elsewhere.parent, Name), filepath.Join(d.parent, Name)); err != nil {
		t.Fatal(err)
	}
	d.Sweep()
	d.Clear()
	content, info := blob(t)
	if _, err := pullOne(t.Context(), d, &fake{content: content, cut: chunk}, info); !errors.Is(err, errCut) {
		t.Error(err)
	}
	if left := names(t, elsewhere); !slices.Equal(left, []string{"file"}) {
		t.Errorf("elsewhere: %q", left)
	}
	if left := names(t, d); len(left) != 1 || left[0] == "file" {
		t.Errorf("here: %q", left)
	}
}

// Nothing that was decrypted is kept, and the next pull begins again.
func TestDecrypted(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	info.Digest = digest.FromString("encrypted")
	for _, cut := range []int{2 * chunk, 0} {
		w := new(watched)
		watcher := w.watcher()
		watcher.Decrypted = true
		src := &fake{content: content, cut: cut}
		pull := d.Begin("registry.test")
		err := pull.Fetch(t.Context(), src, info, watcher)
		if left := names(t, d); len(left) > 0 {
			t.Errorf("files with names: %q", left)
		}
		pull.End(err)
		if cut > 0 && !errors.Is(err, errCut) || cut == 0 && (err != nil || !bytes.Equal(w.content, content)) {
			t.Errorf("cut after %d: %d bytes, %v", cut, len(w.content), err)
		}
		if src.wholes != 1 || w.resumed > 0 {
			t.Errorf("%d whole answers, %d bytes resumed", src.wholes, w.resumed)
		}
	}
}

// What one registry has sent of a blob is not a part of it for pulls from others.
func TestRegistriesShareNothing(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	hostile := d.Begin("hostile.test")
	err := hostile.Fetch(t.Context(), &fake{content: make([]byte, info.Size), cut: 2 * chunk}, info, new(watched).watcher())
	hostile.End(err)
	src := &fake{content: content}
	if got, err := pullOne(t.Context(), d, src, info); err != nil || got.resumed > 0 || !slices.Equal(got.sizes[:1], []int64{chunk}) {
		t.Errorf("%d bytes resumed, shown %d, %v", got.resumed, got.sizes, err)
	}
	if left := names(t, d); len(left) != 1 {
		t.Errorf("left: %q, want what the other registry sent", left)
	}
}

// A fetch that does not wait for another one of the same pull leaves that its file.
func TestFetchesOfOnePull(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	d.Patience = time.Millisecond
	content, info := blob(t)
	pull := d.Begin("registry.test")
	begun, hold := make(chan struct{}), make(chan struct{})
	slow := &fake{content: content, cut: 2 * chunk, hold: hold, holds: sync.OnceFunc(func() { close(begun) })}
	first := make(chan error, 1)
	go func() { first <- pull.Fetch(t.Context(), slow, info, new(watched).watcher()) }()
	<-begun
	if err := pull.Fetch(t.Context(), &fake{content: content}, info, new(watched).watcher()); err != nil {
		t.Error(err)
	}
	kept := pull.former[0].file
	if _, err := kept.Stat(); err != nil {
		t.Errorf("the file of the first fetch: %v", err)
	}
	close(hold)
	if err := <-first; !errors.Is(err, errCut) {
		t.Error(err)
	}
	pull.End(nil)
	if _, err := kept.Stat(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the file after the pull: %v", err)
	}
}

// A directory that was deleted and made again is used, as soon as no pull needs the former.
func TestParentIsReplaced(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	replace := func() {
		if err := errors.Join(os.RemoveAll(d.parent), os.Mkdir(d.parent, 0o700)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := pullOne(t.Context(), d, &fake{content: content}, info); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		replace()
		src := &fake{content: content, cut: chunk}
		src.holds = replace
		if _, err := pullOne(t.Context(), d, src, info); !errors.Is(err, errCut) {
			t.Error(err)
		}
	}
	if got, err := pullOne(t.Context(), d, &fake{content: content, cut: chunk}, info); !errors.Is(err, errCut) || len(got.sizes) != 1 {
		t.Errorf("shown %d, %v", got.sizes, err)
	}
	if left := names(t, d); len(left) != 1 {
		t.Errorf("left: %q", left)
	}
}

// Downloads go from the places that are not used any more, by whatever name they are called.
func TestDeleteElsewhere(t *testing.T) {
	t.Parallel()
	here, other := newDir(t), newDir(t)
	write(t, here, "file", 1, 0)
	write(t, other, "file", 1, 0)
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(here.parent, link); err != nil {
		t.Fatal(err)
	}
	if err := here.DeleteElsewhere([]string{here.parent + "/", link, other.parent, t.TempDir() + "/none"}); err != nil {
		t.Error(err)
	}
	if left := names(t, here); len(left) != 1 {
		t.Errorf("left here: %q", left)
	}
	if _, err := os.Stat(filepath.Join(other.parent, Name)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left elsewhere: %v", err)
	}
}

// link gives a file that a pull has a name of its own.
func link(to string) func(*os.File) error {
	return func(file *os.File) error {
		return unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", file.Fd()), unix.AT_FDCWD, to, unix.AT_SYMLINK_FOLLOW)
	}
}

// A whole file can be linked, whatever its name among the downloads, and is then deleted there.
func TestWholeFilesAreLinked(t *testing.T) {
	t.Parallel()
	for _, err := range []error{nil, errCut} {
		for _, name := range []string{"named", "nameless"} {
			d := newDir(t)
			content, info := blob(t)
			if name == "nameless" {
				info.Size = -1 // unknown
			}
			to := filepath.Join(d.parent, "linked")
			w := new(watched).watcher()
			w.Whole = link(to)
			pull := d.Begin("registry.test")
			if err := pull.Fetch(t.Context(), &fake{content: content}, info, w); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			pull.End(err)
			if got, err := os.ReadFile(to); err != nil || !bytes.Equal(got, content) {
				t.Errorf("%s: %d bytes, %v", name, len(got), err)
			}
			if left := names(t, d); len(left) > 0 {
				t.Errorf("%s: left: %q", name, left)
			}
		}
	}
}

// Nothing is added to a file that has been linked, whatever another manifest says of its size
// and a registry sends.
func TestLinkedFilesStay(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	to := filepath.Join(d.parent, "linked")
	first := d.Begin("registry.test")
	w := new(watched).watcher()
	w.Whole = link(to)
	if err := first.Fetch(t.Context(), &fake{content: content}, info, w); err != nil {
		t.Fatal(err)
	}
	info.Size += 1000
	if _, err := pullOne(t.Context(), d, &fake{content: append(content, make([]byte, 1000)...)}, info); !errors.Is(err, ErrDiffers) {
		t.Error(err)
	}
	first.End(nil)
	if got, err := os.ReadFile(to); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// A blob of unknown size is fetched, and not kept.
func TestUnknownSize(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	content, info := blob(t)
	info.Size = -1
	if got, err := pullOne(t.Context(), d, &fake{content: content}, info); err != nil || !bytes.Equal(got.content, content) {
		t.Errorf("%d bytes, %v", len(got.content), err)
	}
	if _, err := pullOne(t.Context(), d, &fake{content: content, cut: chunk}, info); !errors.Is(err, errCut) {
		t.Error(err)
	}
	if left := names(t, d); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
