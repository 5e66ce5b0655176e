package layers

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/internal/fault"
)

// What is written is read, by more than one reader and while it is being written.
func TestSpool(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := newSpool(dir)
	first := &spoolReader{spool: s}
	if _, err := io.WriteString(s, "half"); err != nil {
		t.Fatal(err)
	}
	half := make([]byte, 10)
	if n, err := first.Read(half); n != 4 || err != nil {
		t.Errorf("%q, %v", half[:n], err)
	}
	go func() {
		_, err := io.WriteString(s, " and more")
		s.end(err)
	}()
	if rest, err := io.ReadAll(first); err != nil || string(rest) != " and more" {
		t.Errorf("%q, %v", rest, err)
	}
	if err := iotest.TestReader(&spoolReader{spool: s}, []byte("half and more")); err != nil {
		t.Error(err)
	}
	if err := s.wait(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("files %v, %v", left, err)
	}
	s.close()
}

// A blob that fails is not read any further.
func TestSpoolFails(t *testing.T) {
	t.Parallel()
	failure := errors.New("failure")
	s := newSpool(t.TempDir())
	defer s.close()
	if _, err := io.WriteString(s, "something"); err != nil {
		t.Fatal(err)
	}
	s.end(failure)
	if got, err := io.ReadAll(&spoolReader{spool: s}); !errors.Is(err, failure) {
		t.Errorf("%q, %v", got, err)
	}
	if err := s.wait(); !errors.Is(err, failure) {
		t.Error(err)
	}
}

// Who still writes to a blob that is not wanted, or waits for it, learns of it.
func TestClosedSpool(t *testing.T) {
	t.Parallel()
	s := newSpool(t.TempDir())
	waited := make(chan error, 1)
	go func() { waited <- s.wait() }()
	s.close()
	if err := <-waited; !errors.Is(err, errClosed) {
		t.Error(err)
	}
	if _, err := io.WriteString(s, "late"); !errors.Is(err, errClosed) {
		t.Error(err)
	}
}

// Content ends well only after its blob and if both have their digests.
func TestContent(t *testing.T) {
	t.Parallel()
	const text = "what the layer has"
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	if _, err := io.WriteString(w, text); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("wrong digest")
	for name, test := range map[string]struct {
		blob    string
		diffID  digest.Digest
		verdict error
		want    error // nil: the whole content
	}{
		"good":           {packed.String(), digest.FromString(text), nil, nil},
		"not compressed": {text, digest.FromString(text), nil, nil},
		"other content":  {packed.String(), digest.FromString("else"), nil, fault.Invalid},
		"other blob":     {packed.String(), digest.FromString(text), broken, broken},
		"newline behind": {packed.String() + "\n", digest.FromString(text), nil, nil},
		"no trailer":     {packed.String()[:packed.Len()-8], digest.FromString(text), nil, nil}, // its digest says that it is whole
		"cut":            {packed.String()[:packed.Len()/2], digest.FromString(text), nil, io.ErrUnexpectedEOF},
	} {
		s := &step{Layer: Layer{DiffID: test.diffID}, blob: newSpool(t.TempDir())}
		if _, err := io.Copy(s.blob, strings.NewReader(test.blob)); err != nil {
			t.Fatal(err)
		}
		if test.verdict == nil {
			s.blob.end(nil)
		}
		c, err := s.open(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if test.verdict != nil {
			s.blob.end(test.verdict)
		}
		got, err := io.ReadAll(c)
		if !errors.Is(err, test.want) || test.want == nil && string(got) != text {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		if c.checked != (test.want == nil) {
			t.Errorf("%s: checked %t", name, c.checked)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		s.blob.close()
	}
}

// A blob may have several members, and something behind them, which is read as well.
func TestDecompressionOfMembers_umoci_358(t *testing.T) {
	t.Parallel()
	for _, behind := range []string{"", strings.Repeat("\x00", 100_000), "no header at all"} {
		blob := strings.NewReader(string(twoMembers(t)) + behind)
		reader, err := decompress(blob, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(reader)
		if err := errors.Join(err, reader.Close()); string(got) != "one member and another" || err != nil || blob.Len() > 0 {
			t.Errorf("%d bytes behind: %q, %v, %d bytes left", len(behind), got, err, blob.Len())
		}
	}
}

// Decoders are used again, whatever has ended what they decoded before.
func TestDecompressionAfterAnother(t *testing.T) {
	t.Parallel()
	noise := make([]byte, 3<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(noise) // never fails
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	if _, err := w.Write(noise); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	packer, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	small := string(twoMembers(t))
	for kind, large := range map[string]string{"gzip": zipped.String(), "zstd": string(packer.EncodeAll(noise, nil))} {
		ways := map[string]struct {
			blob  string
			read  int64 // bytes
			wrong bool
		}{
			"to the end":      {large, math.MaxInt64, false},
			"small":           {small, math.MaxInt64, false},
			"not at all":      {large, 0, false},
			"a little":        {large, 1000, false},
			"half":            {large, 1 << 20, false},
			"cut":             {large[:len(large)/2], math.MaxInt64, true},
			"other checksum":  {large[:len(large)-5] + strings.Repeat("?", 5), math.MaxInt64, true},
			"padding":         {small + strings.Repeat("\x00", 1000), math.MaxInt64, false},
			"larger window":   {zstdFrame(window8M, "text") + zstdFrame(window16M, "text"), math.MaxInt64, false},
			"something after": {zstdFrame(window8M, "text") + "else", math.MaxInt64, true},
		}
		for range 3 {
			for name, way := range ways {
				if _, err := decompressed(way.blob, way.read); (err != nil) != way.wrong {
					t.Errorf("%s, %s: %v", kind, name, err)
				}
				for blob, want := range map[string]string{large: string(noise), small: "one member and another", zstdFrame(window8M, "text"): "text"} {
					if got, err := decompressed(blob, math.MaxInt64); got != want || err != nil {
						t.Fatalf("%s, after %s: %d bytes, %v", kind, name, len(got), err)
					}
				}
			}
		}
	}
}

// decompressed returns what a blob decompresses to, or its first bytes.
func decompressed(blob string, bytes int64) (string, error) {
	reader, err := decompress(strings.NewReader(blob), func() (func(), error) { return func() {}, nil })
	if err != nil {
		return "", err
	}
	content, err := io.ReadAll(io.LimitReader(reader, bytes))
	return string(content), errors.Join(err, reader.Close())
}

func twoMembers(t *testing.T) []byte {
	t.Helper()
	var blob bytes.Buffer
	for _, part := range []string{"one member", " and another"} {
		packed := gzip.NewWriter(&blob)
		if _, err := io.WriteString(packed, part); err != nil {
			t.Fatal(err)
		}
		if err := packed.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return blob.Bytes()
}
