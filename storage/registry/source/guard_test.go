package source

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"go.podman.io/image/v5/types"
	"go.podman.io/storage/pkg/archive"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/frames"
	"github.com/crius-run/crius/storage/pull/progress"
)

const someDigest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// zstdOf compresses as real builders do.
func zstdOf(t testing.TB, content []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := archive.CompressStream(&out, archive.Zstd)
	if err == nil {
		_, err = w.Write(content)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// frame is a zstd frame of one empty block that asks for a window of
// 2^(10+exponent) bytes and mantissa eighths more.
func frame(exponent, mantissa byte) []byte {
	return []byte{0x28, 0xb5, 0x2f, 0xfd, 0, exponent<<3 | mantissa, 1, 0, 0}
}

// singleSegment is a zstd frame whose window is its content, of so many bytes.
func singleSegment(size uint64) []byte {
	return binary.LittleEndian.AppendUint64([]byte{0x28, 0xb5, 0x2f, 0xfd, 0xe0}, size)
}

func skippable(content string) []byte {
	return append(binary.LittleEndian.AppendUint32([]byte{0x5a, 0x2a, 0x4d, 0x18}, uint32(len(content))), content...)
}

// xzHeader is the beginning of a stream whose dictionary has 4 GiB: its reader
// would allocate them at once.
var xzHeader = []byte("\xfd7zXZ\x00\x00\x04\xe6\xd6\xb4\x46\x02\x00\x21\x01\x28\x00\x00\x00")

// repeated is a zstd frame of so many blocks that repeat one byte, 128 KiB each.
func repeated(blocks int) []byte {
	const size = frames.MaxBlock<<3 | 1<<1 // the type of such a block
	block := []byte{size & 0xff, size >> 8 & 0xff, size >> 16 & 0xff, 0}
	return slices.Concat(frame(7, 0)[:6], bytes.Repeat(block, blocks), []byte{1, 0, 0})
}

func TestLayerGuard(t *testing.T) {
	t.Parallel()
	tar := bytes.Repeat([]byte("a tar "), 100_000)
	real := zstdOf(t, tar)
	for _, c := range []struct {
		what    string
		content []byte
		refused string // "": it is not
		large   bool
	}{
		{"tar", tar, "", false},
		{"empty", nil, "", false},
		{"short", []byte{0x28, 0xb5}, "", false},
		{"gzip", []byte("\x1f\x8b\x08 and more"), "", false},
		{"xz", xzHeader, "xz", false},
		{"nearly xz", []byte("\xfd7zXZ and no xz"), "", false},
		{"bzip2", []byte("BZh91AY&SY"), "bzip2", false},
		{"zstd", real, "", false},
		{"zstd frames", bytes.Join([][]byte{real, skippable("table of contents"), real, frame(0, 0), skippable("")}, nil), "", false},
		{"largest window", frame(17, 0), "", true},
		{"small window", frame(13, 0), "", false},
		{"larger than small", frame(13, 1), "", true},
		{"window above the limit", frame(17, 1), "window", false},
		{"largest window there is", frame(31, 7), "window", false},
		{"second frame", append(real[:len(real):len(real)], frame(18, 0)...), "window", false},
		{"after a skippable frame", bytes.Join([][]byte{real, skippable("x"), frame(18, 0)}, nil), "window", false},
		{"skippable frame first", bytes.Join([][]byte{skippable("size"), skippable(""), real, skippable("x")}, nil), "", false},
		{"large window after a first frame to skip", append(skippable("size"), frame(17, 0)...), "", true},
		{"window above the limit after a first frame to skip", append(skippable("size"), frame(18, 0)...), "window", false},
		{"nearly a frame to skip", []byte("Z*M and a tar"), "", false},
		{"content is the window", singleSegment(maxWindow), "", true},
		{"huge content is the window", singleSegment(maxWindow + 1), "window", false},
		{"endless content is the window", singleSegment(1<<64 - 1), "window", false},
		{"no frame after a frame", append(frame(0, 0), "and now something else"...), "frame", false},
		{"unknown block", []byte{0x28, 0xb5, 0x2f, 0xfd, 0, 0, 7, 0, 0}, "block", false},
	} {
		for how, wrap := range map[string]func(io.Reader) io.Reader{
			"at once": func(r io.Reader) io.Reader { return r }, "by bytes": iotest.OneByteReader, "by halves": iotest.HalfReader,
			"with the end": iotest.DataErrReader,
		} {
			asked := 0
			guard := &layerGuard{
				ReadCloser: io.NopCloser(wrap(bytes.NewReader(c.content))),
				layer:      someDigest,
				answers:    new(atomic.Int64),
				expansion:  new(expansion),
				left:       int64(len(c.content)),
				admitLarge: func() error { asked++; return nil },
			}
			got, err := io.ReadAll(guard)
			switch {
			case c.refused == "" && (err != nil || !bytes.Equal(got, c.content)):
				t.Errorf("%s %s: %d of %d bytes, %v", c.what, how, len(got), len(c.content), err)
			case c.refused != "" && (!errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), c.refused) || !strings.Contains(err.Error(), someDigest)):
				t.Errorf("%s %s: %v", c.what, how, err)
			case (asked > 0) != c.large:
				t.Errorf("%s %s: %d large windows", c.what, how, asked)
			}
			if _, again := guard.Read(make([]byte, 1)); c.refused != "" && !errors.Is(again, fault.Invalid) {
				t.Errorf("%s %s: reads on after %v: %v", c.what, how, err, again)
			}
		}
	}
}

// A layer may decompress to the free space, and beyond that by the factor that gzip could reach.
// Earlier layers count.
func TestExpansion(t *testing.T) {
	t.Parallel()
	const inRoom = minRoom / frames.MaxBlock
	for _, c := range []struct {
		what    string
		room    int64
		layers  [][]byte
		refused bool // the last of them
	}{
		{"as much as there is room for", 0, [][]byte{repeated(inRoom)}, false},
		{"a block more", 0, [][]byte{repeated(inRoom + 1)}, true},
		{"a block more, after a frame to skip", 0, [][]byte{append(skippable("x"), repeated(inRoom+1)...)}, true},
		{"a block more, with room", minRoom + frames.MaxBlock, [][]byte{repeated(inRoom + 1)}, false},
		{"two layers", 0, [][]byte{repeated(inRoom / 2), repeated(inRoom/2 + 1)}, true},
		{"two frames", 0, [][]byte{append(repeated(inRoom/2), repeated(inRoom/2+1)...)}, true},
		{"as much as gzip could", 0, [][]byte{make([]byte, 2*minRoom/maxExpansion), repeated(2 * inRoom)}, false},
	} {
		e := &expansion{room: c.room}
		for i, content := range c.layers {
			_, err := io.ReadAll(&layerGuard{
				ReadCloser: io.NopCloser(bytes.NewReader(content)), layer: someDigest, answers: new(atomic.Int64), expansion: e,
				left: int64(len(content)), admitLarge: func() error { return nil },
			})
			if refused := c.refused && i == len(c.layers)-1; (err != nil) != refused {
				t.Errorf("%s, layer %d: %v", c.what, i, err)
			} else if refused && (!errors.Is(err, fault.Exhausted) || !errors.Is(err, ErrExpands) || !strings.Contains(err.Error(), someDigest)) {
				t.Errorf("%s: %v", c.what, err)
			}
		}
	}
}

// Pulls of layers with large windows take turns, whole pulls at a time, and the
// end of a pull gives its turn back.
func TestLargeWindowsTakeTurns(t *testing.T) {
	t.Parallel()
	turn := make(chan struct{}, 1)
	first, second := &Image{LargeWindows: turn}, &Image{LargeWindows: turn}
	for range 3 { // layers of one pull
		if err := first.admitLarge(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if err := second.admitLarge(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("while another pull has its turn: %v", err)
	}
	first.End()
	first.End()
	if err := second.admitLarge(context.Background()); err != nil {
		t.Error(err)
	}
	second.End()
	if len(turn) != 0 {
		t.Error("a turn was not given back")
	}
}

// A pull that waits for its turn is not one to which the registry sends nothing; when it has
// its turn, it is again.
func TestWaitForLargeWindowsIsNoStall(t *testing.T) {
	t.Parallel()
	for what, rate := range map[string]int64{"any rate": 0, "a rate": 1 << 10} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const limit = 5 * time.Minute
				turn := make(chan struct{}, 1)
				first, second := &Image{LargeWindows: turn}, &Image{LargeWindows: turn}
				if err := first.admitLarge(t.Context()); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				w := progress.New(new(progress.Counts), "image", limit, rate, second.Asked, cancel)
				w.Waited = second.Waited
				defer w.Start(t.Context()).Stop()
				w.Events <- types.ProgressProperties{Event: types.ProgressEventNewArtifact, Artifact: types.BlobInfo{Digest: someDigest, Size: 10}}
				admitted := make(chan error, 1)
				go func() { admitted <- second.admitLarge(ctx) }()
				time.Sleep(3*limit - time.Second)
				first.End()
				if err := <-admitted; err != nil {
					t.Errorf("it waited: %v", err)
				}
				time.Sleep(limit - time.Second)
				if ctx.Err() != nil {
					t.Errorf("at once when it had its turn: %v", context.Cause(ctx))
				}
				time.Sleep(limit + 2*time.Second)
				if ctx.Err() == nil {
					t.Error("nothing came, and it was not ended")
				}
				second.End()
			})
		})
	}
}

// In whatever pieces the bytes come, the verdict is the same, and accepted bytes are unchanged.
func FuzzLayerGuard(f *testing.F) {
	for _, seed := range [][]byte{xzHeader, frame(17, 1), frame(13, 1), singleSegment(5), skippable("x"), append(skippable("x"), frame(18, 0)...), zstdOf(f, []byte("content"))} {
		f.Add(seed)
		f.Add(append(frame(0, 0), seed...))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		read := func(r io.Reader) ([]byte, error) {
			return io.ReadAll(&layerGuard{ReadCloser: io.NopCloser(r), layer: someDigest, answers: new(atomic.Int64), expansion: new(expansion), left: math.MaxInt64, admitLarge: func() error { return nil }})
		}
		whole, err := read(bytes.NewReader(content))
		if err == nil && !bytes.Equal(whole, content) {
			t.Errorf("%x became %x", content, whole)
		}
		passed, slowly := read(iotest.OneByteReader(bytes.NewReader(content)))
		if (err == nil) != (slowly == nil) || !bytes.HasPrefix(content, passed) {
			t.Errorf("%x: at once %v, by bytes %v, %x", content, err, slowly, passed)
		}
	})
}
