package layers

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

// Windows of zstd frames, as their headers have them.
const (
	window8M  = (23 - 10) << 3
	window16M = (24 - 10) << 3
)

// zstdFrame is a frame of one block of plain text.
func zstdFrame(window byte, text string) string {
	size := len(text)<<3 | 1 // the last block
	return "\x28\xb5\x2f\xfd\x00" + string([]byte{window, byte(size), byte(size >> 8), byte(size >> 16)}) + text
}

// skippedFrame is a frame without content, of a kind.
func skippedFrame(kind byte, text string) string {
	return string([]byte{0x50 | kind, 0x2a, 0x4d, 0x18, byte(len(text)), 0, 0, 0}) + text
}

// pzstd begins with a frame to skip. Whichever frame needs a large window waits for room, once.
func TestZstdFrames(t *testing.T) {
	t.Parallel()
	errFull := errors.New("no room")
	for name, c := range map[string]struct {
		blob, want string
		large      int // windows that were asked for
		full       bool
		err        string
	}{
		"one":                       {blob: zstdFrame(window8M, "text"), want: "text"},
		"skipped first":             {blob: skippedFrame(0, "size") + zstdFrame(window8M, "text"), want: "text"},
		"several skipped":           {blob: skippedFrame(1, "") + skippedFrame(15, "x") + zstdFrame(window8M, "a") + skippedFrame(3, "y") + zstdFrame(window8M, "b"), want: "ab"},
		"large":                     {blob: zstdFrame(window16M, "text"), want: "text", large: 1},
		"large after a skipped one": {blob: skippedFrame(0, "x") + zstdFrame(window16M, "text"), want: "text", large: 1},
		"large later, twice":        {blob: zstdFrame(window8M, "a") + zstdFrame(window16M, "b") + zstdFrame(window16M, "c"), want: "abc", large: 1},
		"no room":                   {blob: zstdFrame(window8M, "a") + zstdFrame(window16M, "b"), large: 1, full: true, err: errFull.Error()},
		"only skipped ones":         {blob: skippedFrame(0, "x") + skippedFrame(1, "")},
		"cut while it is skipped":   {blob: skippedFrame(0, "long")[:10], err: io.ErrUnexpectedEOF.Error()},
		"something else after it":   {blob: zstdFrame(window8M, "a") + "a tar archive", err: "invalid data after a zstd frame"},
		"gzip after a skipped one":  {blob: skippedFrame(0, "x") + "\x1f\x8b\x08\x00", err: "invalid data after a zstd frame"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			asked, left := 0, 0
			unpacked, err := decompress(strings.NewReader(c.blob), func() (func(), error) {
				asked++
				if c.full {
					return nil, errFull
				}
				left++
				return func() { left-- }, nil
			})
			var got bytes.Buffer
			if err == nil {
				_, err = io.Copy(&got, unpacked)
				err = errors.Join(err, unpacked.Close())
			}
			if c.err == "" && (err != nil || got.String() != c.want) || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Errorf("%q, %v", got.String(), err)
			}
			if asked != c.large || left != 0 {
				t.Errorf("asked for room %d times, want %d; %d are left", asked, c.large, left)
			}
		})
	}
}

// A decoder that gets room after the blob was closed does not keep it.
func TestRoomAfterCloseIsGivenUp(t *testing.T) {
	t.Parallel()
	given := 0
	w := &windowed{admit: func() (func(), error) { return func() { given++ }, nil }}
	w.close()
	if err := w.window(smallWindow + 1); !errors.Is(err, errClosed) || given != 1 {
		t.Errorf("%v, given up %d times", err, given)
	}
}
