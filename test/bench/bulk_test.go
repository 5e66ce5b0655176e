package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/test/kit/image"
)

// A layer assembled from pieces is a gzip stream with a tar archive like any
// other, and its digests, sizes and content match.
func TestBulkLayerIsALayer(t *testing.T) {
	chunks, err := newChunks()
	if err != nil {
		t.Fatal(err)
	}
	const size = 40 << 20
	l, err := newBulkLayer(chunks, 3, size, image.Regular("program", 0o755, []byte("content")))
	if err != nil {
		t.Fatal(err)
	}
	blob, err := io.ReadAll(io.NewSectionReader(l.blob, 0, l.Size))
	if err != nil || digest.FromBytes(blob) != l.Digest || int64(len(blob)) != l.Size {
		t.Fatalf("the blob has %d bytes and the digest %s, %v; want %d and %s", len(blob), digest.FromBytes(blob), err, l.Size, l.Digest)
	}
	if l.Size < size/2 || l.Size > size*4/5 {
		t.Errorf("%d bytes are compressed to %d", size, l.Size)
	}
	z, err := gzip.NewReader(bytes.NewReader(blob))
	if err != nil {
		t.Fatal(err)
	}
	plain, err := io.ReadAll(z) // and compares the checksum
	if err != nil || digest.FromBytes(plain) != l.DiffID || int64(len(plain)) != l.unpacked || len(plain) < size-chunkSize || len(plain) > size+chunkSize {
		t.Fatalf("unpacked it has %d bytes, %v", len(plain), err)
	}
	files := map[string][]byte{}
	for archive := tar.NewReader(bytes.NewReader(plain)); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[header.Name], err = io.ReadAll(archive); err != nil {
			t.Fatal(err)
		}
	}
	if string(files["program"]) != "content" || len(files["data/003/000"]) != fileChunks*chunkSize || !bytes.Equal(files["hot/003"], l.hot) {
		t.Errorf("its files are not those that were packed")
	}
	sum, read := (&bigImage{layers: []bulkLayer{l}}).hotSum()
	if want := fmt.Sprintf("%x", sha256.Sum256(append(fmt.Appendf(nil, "/hot/003 %d\n", len(l.hot)), l.hot...))); sum != want || read != hotChunks*chunkSize {
		t.Errorf("the sum of what is read is %s of %d bytes, want %s", sum, read, want)
	}
}

func TestPiecesAreReadFromAnywhere(t *testing.T) {
	var p pieces
	for _, part := range []string{"one", "two", "three"} {
		p.add([]byte(part))
	}
	const whole = "onetwothree"
	for from := range len(whole) + 1 {
		for count := range len(whole) - from + 1 {
			got := make([]byte, count)
			if n, err := p.ReadAt(got, int64(from)); n != count || err != nil || string(got) != whole[from:from+count] {
				t.Errorf("%d bytes from %d are %q, %v", count, from, got[:n], err)
			}
		}
	}
	if n, err := p.ReadAt(make([]byte, 4), 9); n != 2 || !errors.Is(err, io.EOF) {
		t.Errorf("beyond the end: %d, %v", n, err)
	}
}
