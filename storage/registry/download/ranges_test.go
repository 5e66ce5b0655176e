package download

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"
)

// small is the size of ranges in tests.
const small = 64 << 10

// long is a blob of many ranges.
func long() ([]byte, types.BlobInfo) {
	content := make([]byte, 10*small+500)
	_, _ = rand.NewChaCha8([32]byte{}).Read(content)
	return content, types.BlobInfo{Digest: digest.FromBytes(content), Size: int64(len(content))}
}

// ranged is a registry that sends parts. Its whole answer waits for more before the first range.
type ranged struct {
	content []byte
	more    chan struct{}
	waits   func()                                                                  // while it does
	part    func(ctx context.Context, n int, from, length int64) (io.Reader, error) // the n-th answer, nil: the right one

	mu      sync.Mutex
	asked   []string
	open    int // answers
	most    int
	guarded bytes.Buffer
}

func (r *ranged) Whole(ctx context.Context, _ types.BlobInfo) (io.ReadCloser, error) {
	const pause = 2*small - 100
	return r.answer("", io.MultiReader(bytes.NewReader(r.content[:pause]), &stuck{ctx, r.more}, bytes.NewReader(r.content[pause:]))), nil
}

func (r *ranged) Part(ctx context.Context, _ types.BlobInfo, from, length int64) (io.ReadCloser, error) {
	body := r.answer(fmt.Sprintf("%d+%d", from, length), nil)
	if r.part != nil {
		reader, err := r.part(ctx, body.n, from, length)
		if err != nil {
			return nil, errors.Join(err, body.Close())
		}
		body.Reader = reader
	}
	if body.Reader == nil {
		body.Reader = r.right(from, length)
	}
	return body, nil
}

// right returns the requested bytes.
func (r *ranged) right(from, length int64) io.Reader {
	if length == 0 {
		length = int64(len(r.content)) - from
	}
	return io.NewSectionReader(bytes.NewReader(r.content), from, length)
}

func (*ranged) Answer() string { return "the answer" }
func (*ranged) Mirrored() bool { return false }

func (r *ranged) Guard(_ context.Context, _ types.BlobInfo, stream io.ReadCloser) io.ReadCloser {
	return struct {
		io.Reader
		io.Closer
	}{io.TeeReader(stream, &r.guarded), stream}
}

// answer counts until it is closed.
func (r *ranged) answer(asked string, body io.Reader) *openAnswer {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = append(r.asked, asked)
	r.open++
	r.most = max(r.most, r.open)
	return &openAnswer{body, r, len(r.asked)}
}

type openAnswer struct {
	io.Reader
	of *ranged
	n  int
}

func (a *openAnswer) Close() error {
	a.of.mu.Lock()
	defer a.of.mu.Unlock()
	a.of.open--
	return nil
}

// stuck sends nothing, and ends at last.
type stuck struct {
	ctx   context.Context
	until <-chan struct{}
}

func (s *stuck) Read([]byte) (int, error) {
	select {
	case <-s.until:
		return 0, io.EOF
	case <-s.ctx.Done():
		return 0, s.ctx.Err()
	}
}

// broken ends with an error after some bytes.
func broken(r io.Reader, after int64) io.Reader {
	return io.MultiReader(io.LimitReader(r, after), errorReader{})
}

type errorReader struct{}

func (errorReader) Read([]byte) (int, error) { return 0, errCut }

// wide is a directory whose pulls may have several connections.
func wide(t *testing.T, connections int) *Dir {
	d := newDir(t)
	d.RangeSize = small
	d.Connections.Store(int64(connections))
	d.Limits.Age = math.MaxInt64 // clocks of bubbles are wrong
	return d
}

// openFiles returns the open files of the process below a directory.
func openFiles(t *testing.T, d *Dir) (open []string) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if path, err := os.Readlink(filepath.Join("/proc/self/fd", fd.Name())); err == nil && strings.HasPrefix(path, filepath.Join(d.parent, Name)) {
			open = append(open, path)
		}
	}
	return open
}

// fetchLong fetches a blob from a registry, which sends more of the whole when a range has
// come, or none can.
func fetchLong(ctx context.Context, d *Dir, src *ranged, info types.BlobInfo) result {
	src.more = make(chan struct{})
	done := make(chan result, 1)
	go func() {
		w := new(watched)
		pull := d.Begin("registry.test")
		err := pull.Fetch(ctx, src, info, w.watcher())
		pull.End(err)
		done <- result{w, err}
	}()
	synctest.Wait()
	if src.waits != nil {
		src.waits()
	}
	close(src.more)
	return <-done
}

// A large blob comes over as many connections as the pull may have, each byte once, and is
// shown in order as it comes. Nothing stays.
func TestRanges(t *testing.T) {
	t.Parallel()
	for connections := 1; connections <= 4; connections++ {
		synctest.Test(t, func(t *testing.T) {
			d := wide(t, connections)
			content, info := long()
			src := &ranged{content: content}
			got := fetchLong(t.Context(), d, src, info)
			if got.err != nil || !bytes.Equal(got.content, content) || !bytes.Equal(src.guarded.Bytes(), content) {
				t.Fatalf("%d bytes, %d of them guarded, %v", len(got.content), src.guarded.Len(), got.err)
			}
			want := []string{""}
			for from := int64(2 * small); from < info.Size && connections > 1; from += small {
				want = append(want, fmt.Sprintf("%d+%d", from-overlap, min(small, info.Size-from)+overlap))
			}
			if slices.Sort(src.asked); !slices.Equal(src.asked, sortedStrings(want)) {
				t.Errorf("asked for %q, want %q", src.asked, want)
			}
			if got.came != info.Size || got.resumed != 0 || len(got.sizes) < 3 {
				t.Errorf("%d bytes came, %d were here, shown %d", got.came, got.resumed, got.sizes)
			}
			checkClosed(t, d, src, got.watched)
			if src.most > connections || len(names(t, d)) > 0 {
				t.Errorf("%d connections, left: %q", src.most, names(t, d))
			}
		})
	}
}

func sortedStrings(list []string) []string { return slices.Sorted(slices.Values(list)) }

// checkClosed checks that a fetch has left nothing open.
func checkClosed(t *testing.T, d *Dir, src *ranged, w *watched) {
	t.Helper()
	if open := openFiles(t, d); src.open != 0 || w.connections.Load() != 0 || len(open) > 0 {
		t.Errorf("%d answers, %d connections and %q are open", src.open, w.connections.Load(), open)
	}
}

// Whatever becomes of ranges, the blob comes as over one connection.
func TestRangesThatFail(t *testing.T) {
	t.Parallel()
	content, info := long()
	right := (&ranged{content: content}).right
	type part = func(ctx context.Context, n int, from, length int64) (io.Reader, error)
	for name, test := range map[string]struct {
		part part // for all that is not the rest
		most int  // answers, of which the first one is whole
	}{
		"no ranges": {func(context.Context, int, int64, int64) (io.Reader, error) { return nil, errors.ErrUnsupported }, 2},
		"refused":   {func(context.Context, int, int64, int64) (io.Reader, error) { return nil, errDenied }, 4},
		"wrong part": {func(_ context.Context, _ int, _, length int64) (io.Reader, error) {
			return right(0, length), nil
		}, 7},
		"another wrong part": {func(_ context.Context, n int, from, length int64) (io.Reader, error) {
			if n < 5 {
				return nil, nil
			}
			return right(from-small, length), nil
		}, 12},
		"no answer": {func(ctx context.Context, _ int, _, _ int64) (io.Reader, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}, 5},
		"no bytes": {func(ctx context.Context, _ int, _, _ int64) (io.Reader, error) { return &stuck{ctx: ctx}, nil }, 5},
		"late": {func(ctx context.Context, n int, _, _ int64) (io.Reader, error) {
			if n > 3 {
				return nil, nil
			}
			return &stuck{ctx: ctx}, nil
		}, 10},
		"stuck": {func(ctx context.Context, _ int, from, _ int64) (io.Reader, error) {
			return io.MultiReader(right(from, overlap+1000), &stuck{ctx: ctx}), nil
		}, 20},
		"one is stuck": {func(ctx context.Context, n int, from, _ int64) (io.Reader, error) {
			if n != 4 {
				return nil, nil
			}
			return io.MultiReader(right(from, overlap+1000), &stuck{ctx: ctx}), nil
		}, 11},
		"short": {func(_ context.Context, _ int, from, length int64) (io.Reader, error) {
			return right(from, min(length, overlap+small/2)), nil
		}, 18},
		"too long": {func(_ context.Context, _ int, from, _ int64) (io.Reader, error) { return right(from, 0), nil }, 10},
		"broken": {func(_ context.Context, _ int, from, length int64) (io.Reader, error) {
			return broken(right(from, length), overlap+1000), nil
		}, 14},
		"one is broken": {func(_ context.Context, n int, from, length int64) (io.Reader, error) {
			if n != 5 {
				return nil, nil
			}
			return broken(right(from, length), overlap+1000), nil
		}, 11}, // and is asked for again
		"broken, then wrong": {func(_ context.Context, n int, from, length int64) (io.Reader, error) {
			if n == 2 {
				return broken(right(from, length), overlap+1000), nil
			}
			return right(0, length), nil
		}, 12},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				d := wide(t, 3)
				src := &ranged{content: content, part: func(ctx context.Context, n int, from, length int64) (io.Reader, error) {
					if length == 0 {
						return nil, nil
					}
					return test.part(ctx, n, from, length)
				}}
				got := fetchLong(t.Context(), d, src, info)
				if got.err != nil || !bytes.Equal(got.content, content) || !bytes.Equal(src.guarded.Bytes(), content) {
					t.Errorf("%d bytes, %d of them guarded, %v", len(got.content), src.guarded.Len(), got.err)
				}
				if len(src.asked) > test.most || slices.Index(src.asked[1:], "") >= 0 || src.most > 3 {
					t.Errorf("asked for %q, for %d at once", src.asked, src.most)
				}
				if name == "one is broken" && slices.ContainsFunc(src.asked, func(asked string) bool { return strings.HasSuffix(asked, "+0") }) {
					t.Errorf("asked for the rest instead of a range: %q", src.asked)
				}
				checkClosed(t, d, src, got.watched)
			})
		})
	}
}

// Ranges that have come ahead are not part of the file, which stays the beginning of its blob: the
// next pull continues there. A cancelled pull leaves nothing open.
func TestRangesAndResume(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := wide(t, 3)
		content, info := long()
		ctx, cancel := context.WithCancel(t.Context())
		src := &ranged{content: content}
		src.part = func(ctx context.Context, _ int, from, _ int64) (io.Reader, error) {
			if from == 4*small-overlap { // and those after it come
				return io.MultiReader(src.right(from, overlap+1000), &stuck{ctx: ctx}), nil
			}
			return nil, nil
		}
		d.Patience *= 1000
		src.more = make(chan struct{})
		w := new(watched)
		done := make(chan error, 1)
		go func() {
			pull := d.Begin("registry.test")
			err := pull.Fetch(ctx, src, info, w.watcher())
			pull.End(err)
			done <- err
		}()
		synctest.Wait()
		if w.came < 3*small-100 {
			t.Errorf("%d bytes came, want those of a range as well", w.came)
		}
		if d.named[fileName(info.Digest, "registry.test")].came.Load() == 0 {
			t.Error("pulls that wait for this one do not see that bytes come")
		}
		close(src.more)
		synctest.Wait()
		if w.connections.Load() == 0 || w.came < 9*small {
			t.Errorf("%d connections, %d bytes came", w.connections.Load(), w.came)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		checkClosed(t, d, src, w)
		kept, err := os.ReadFile(pathOf(d, names(t, d)[0]))
		if err != nil || len(kept) != 4*small+1000 || !bytes.HasPrefix(content, kept) {
			t.Fatalf("%d bytes are kept, %v", len(kept), err)
		}
		src = &ranged{content: content}
		src.part = func(ctx context.Context, _ int, from, length int64) (io.Reader, error) {
			if length == 0 { // waits before the first range, too
				return io.MultiReader(src.right(from, 6*small-100-from), &stuck{ctx, src.more}, src.right(6*small-100, 0)), nil
			}
			return nil, nil
		}
		got := fetchLong(t.Context(), d, src, info)
		if got.err != nil || !bytes.Equal(got.content, content) || len(src.asked) < 5 {
			t.Errorf("%d bytes, asked for %q, %v", len(got.content), src.asked, got.err)
		}
		if int(got.resumed) != len(kept) || got.resumed+got.came != info.Size {
			t.Errorf("%d bytes were here, %d came", got.resumed, got.came)
		}
		checkClosed(t, d, src, got.watched)
	})
}

// The connection for the rest of a blob is made again as long as each brings something.
func TestRestIsAskedForAgain(t *testing.T) {
	t.Parallel()
	for brings, fails := range map[int64]bool{2 * small: false, 100: true, 0: true} {
		synctest.Test(t, func(t *testing.T) {
			d := wide(t, 2)
			content, info := long()
			src := &ranged{content: content}
			src.part = func(_ context.Context, n int, from, length int64) (io.Reader, error) {
				switch {
				case n == 2:
					return broken(src.right(from, length), overlap+1000), nil
				case length != 0:
					return nil, errors.ErrUnsupported
				}
				return io.LimitReader(src.right(from, length), brings), nil
			}
			got := fetchLong(t.Context(), d, src, info)
			if fails && !errors.Is(got.err, io.ErrUnexpectedEOF) || !fails && (got.err != nil || !bytes.Equal(got.content, content)) {
				t.Errorf("each brings %d: asked for %q, %v", brings, src.asked, got.err)
			}
			if left := names(t, d); len(left) > 0 != fails {
				t.Errorf("left: %q", left)
			}
			checkClosed(t, d, src, got.watched)
		})
	}
}

// The blobs of a pull share its connections: each has one, and the others fetch ranges.
func TestBlobsShareConnections(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := wide(t, 3)
		content, info := long()
		pull, more := d.Begin("registry.test"), make(chan struct{})
		var sources [2]ranged
		var seen [2]watched
		done := make(chan error)
		for i := range sources {
			src, info := &sources[i], info
			info.Size -= int64(i)
			info.Digest = digest.FromBytes(content[:info.Size])
			src.content, src.more = content[:info.Size], more
			src.part = func(ctx context.Context, _ int, from, length int64) (io.Reader, error) {
				const begins = overlap + 1000
				return io.MultiReader(src.right(from, begins), &stuck{ctx, more}, src.right(from+begins, length-begins)), nil
			}
			go func() { done <- pull.Fetch(t.Context(), src, info, seen[i].watcher()) }()
		}
		synctest.Wait()
		open, told := sources[0].open+sources[1].open, seen[0].connections.Load()+seen[1].connections.Load()
		if int64(open) != told || open < 3 || open > 4 { // the second one may have come when all were in use
			t.Errorf("%d connections, of which %d were told, want 3", open, told)
		}
		close(more)
		for range sources {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		pull.End(nil)
		for i := range sources {
			checkClosed(t, d, &sources[i], &seen[i])
		}
	})
}

// What comes ahead makes room for the blob itself on a disk that is full.
func TestRangesMakeRoom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := onDisk(t)
		d.RangeSize = small
		d.Connections.Store(3)
		content, info := long()
		src := &ranged{content: content, waits: func() { fillUp(t, d, info.Size-small/2) }}
		got := fetchLong(t.Context(), d, src, info)
		if got.err != nil || !bytes.Equal(got.content, content) {
			t.Errorf("%d bytes, %v", len(got.content), got.err)
		}
		checkClosed(t, d, src, got.watched)
	})
	synctest.Test(t, func(t *testing.T) {
		d := onDisk(t)
		d.RangeSize = small
		d.Connections.Store(3)
		content, info := long()
		fillUp(t, d, info.Size+small)
		src := &ranged{content: content}
		if got := fetchLong(t.Context(), d, src, info); got.err != nil || len(src.asked) != 1 {
			t.Errorf("a disk with room for the blob alone: asked for %q, %v", src.asked, got.err)
		}
	})
}

// fillUp leaves so much free on a disk.
func fillUp(t *testing.T, d *Dir, but int64) {
	t.Helper()
	free, err := d.room(nil)
	if err == nil {
		err = os.WriteFile(filepath.Join(d.parent, "full"), make([]byte, free-but), 0o600)
	}
	if err != nil {
		t.Error(err)
	}
}
