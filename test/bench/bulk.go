package main

import (
	"archive/tar"
	"bytes"
	"compress/flate"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"runtime"
	"sort"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/tools"
)

// An image of many gigabytes neither fits into memory nor should wear the disk
// besides the pulls. Its layers therefore consist of chunks of text, compressed
// once, each layer in its own order: the gzip format permits concatenating such
// pieces.
const (
	chunkSize  = 1 << 20
	chunkCount = 64
	fileChunks = 16 // in a file
	hotChunks  = 2  // in the small part of a layer that containers read
	hotDir     = "hot"
)

// bulk is the content of large images.
type bulk struct {
	layers []bulkLayer
}

// bulkLayer is a layer whose blob is in pieces.
type bulkLayer struct {
	image.Layer
	blob     *pieces
	unpacked int64
	name     string // of its file in hotDir
	hot      []byte // what the file has
}

// newBulk makes layers of that many bytes, unpacked. The first one contains the
// probe, too.
func newBulk(ctx context.Context, layers int, size int64) (*bulk, error) {
	repository, err := tools.Repository()
	if err != nil {
		return nil, err
	}
	probe, err := image.GoProgram(ctx, "probe", repository, "./test/images/probe")
	if err != nil {
		return nil, err
	}
	chunks, err := newChunks()
	if err != nil {
		return nil, err
	}
	b := &bulk{layers: make([]bulkLayer, layers)}
	var packing errgroup.Group
	packing.SetLimit(runtime.NumCPU())
	for i := range layers {
		packing.Go(func() (err error) {
			var programs []image.File
			if i == 0 {
				programs = append(programs, probe)
			}
			b.layers[i], err = newBulkLayer(chunks, i, size, programs...)
			return err
		})
	}
	return b, packing.Wait()
}

// newBulkLayer makes the layer with that number.
func newBulkLayer(chunks []chunk, number int, size int64, programs ...image.File) (bulkLayer, error) {
	random := rand.New(rand.NewPCG(uint64(number), 0))
	some := func(count int) (picked []chunk) {
		for range count {
			picked = append(picked, chunks[random.IntN(len(chunks))])
		}
		return picked
	}
	l := bulkLayer{name: fmt.Sprintf("%s/%03d", hotDir, number)}
	a := newArchive()
	for _, f := range programs {
		c, err := pack(f.Data)
		if err != nil {
			return l, err
		}
		a.file(f.Header, c)
	}
	a.file(image.Dir(hotDir).Header)
	hot := some(hotChunks)
	for _, c := range hot {
		l.hot = append(l.hot, c.plain...)
	}
	a.file(image.Regular(l.name, 0o644, nil).Header, hot...)
	a.file(image.Dir("data").Header)
	a.file(image.Dir(fmt.Sprintf("data/%03d", number)).Header)
	for i := 0; a.unpacked+chunkSize <= size; i++ {
		count := min(fileChunks, int((size-a.unpacked)/chunkSize))
		a.file(image.Regular(fmt.Sprintf("data/%03d/%03d", number, i), 0o644, nil).Header, some(count)...)
	}
	err := a.finish(&l)
	return l, err
}

// chunk is a piece of an archive, plain and as a part of a gzip stream.
type chunk struct{ plain, packed []byte }

func newChunks() ([]chunk, error) {
	text := newText()
	chunks := make([]chunk, chunkCount)
	var packing errgroup.Group
	packing.SetLimit(runtime.NumCPU())
	for i := range chunks {
		var plain []byte
		for len(plain) < chunkSize {
			plain = append(plain, text.next(chunkSize)...)
		}
		packing.Go(func() (err error) {
			chunks[i], err = pack(plain[:chunkSize])
			return err
		})
	}
	return chunks, packing.Wait()
}

// pack compresses a piece so that others can precede and follow it.
func pack(plain []byte) (chunk, error) {
	var packed bytes.Buffer
	w, err := flate.NewWriter(&packed, flate.DefaultCompression)
	if err != nil {
		return chunk{}, err
	}
	if _, err := w.Write(plain); err != nil {
		return chunk{}, err
	}
	err = w.Flush() // to the end of a byte, and not the last block
	return chunk{plain, packed.Bytes()}, err
}

// archive is a compressed tar archive under construction.
type archive struct {
	blob         pieces
	unpacked     int64
	packed, diff hash.Hash // SHA-256 of the blob and of its decompressed content
	crc          hash.Hash32
	err          error
}

func newArchive() *archive {
	a := &archive{packed: sha256.New(), diff: sha256.New(), crc: crc32.NewIEEE()}
	a.raw([]byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255}) // RFC 1952: deflate, no time, no name
	return a
}

// file adds a file that consists of chunks.
func (a *archive) file(header tar.Header, content ...chunk) {
	header.ModTime = time.Unix(1704067200, 0)
	for _, c := range content {
		header.Size += int64(len(c.plain))
	}
	var head bytes.Buffer
	if err := tar.NewWriter(&head).WriteHeader(&header); err != nil {
		a.err = errors.Join(a.err, err)
	}
	a.plain(head.Bytes())
	for _, c := range content {
		a.chunk(c)
	}
	const block = 512
	a.plain(make([]byte, (block-header.Size%block)%block))
}

func (a *archive) plain(data []byte) {
	if len(data) == 0 {
		return
	}
	c, err := pack(data)
	a.err = errors.Join(a.err, err)
	a.chunk(c)
}

func (a *archive) chunk(c chunk) {
	a.unpacked += int64(len(c.plain))
	a.diff.Write(c.plain)
	a.crc.Write(c.plain)
	a.raw(c.packed)
}

func (a *archive) raw(data []byte) {
	a.packed.Write(data)
	a.blob.add(data)
}

// finish ends the archive and stores it in a layer.
func (a *archive) finish(l *bulkLayer) error {
	a.plain(make([]byte, 1024)) // the end of a tar archive
	var last bytes.Buffer
	w, err := flate.NewWriter(&last, flate.DefaultCompression)
	if err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	trailer := binary.LittleEndian.AppendUint32(last.Bytes(), a.crc.Sum32())
	a.raw(binary.LittleEndian.AppendUint32(trailer, uint32(a.unpacked))) //nolint:gosec // modulo 2^32, as RFC 1952 has it
	l.blob, l.unpacked = &a.blob, a.unpacked
	l.Layer = image.Layer{
		Size:   a.blob.size(),
		Digest: digest.NewDigest(digest.SHA256, a.packed),
		DiffID: digest.NewDigest(digest.SHA256, a.diff),
	}
	return a.err
}

// pieces are read as one.
type pieces struct {
	parts [][]byte
	ends  []int64 // of each part, from the beginning
}

func (p *pieces) add(part []byte) {
	p.parts = append(p.parts, part)
	p.ends = append(p.ends, p.size()+int64(len(part)))
}

func (p *pieces) size() int64 {
	if len(p.ends) == 0 {
		return 0
	}
	return p.ends[len(p.ends)-1]
}

// ReadAt implements io.ReaderAt.
func (p *pieces) ReadAt(to []byte, from int64) (n int, err error) {
	i := sort.Search(len(p.ends), func(i int) bool { return p.ends[i] > from })
	for ; i < len(p.parts) && n < len(to); i++ {
		part := p.parts[i]
		begin := from + int64(n) - (p.ends[i] - int64(len(part)))
		n += copy(to[n:], part[begin:])
	}
	if n < len(to) {
		err = io.EOF
	}
	return n, err
}

// A bigImage has some layers of a bulk.
type bigImage struct {
	*image.Artifact
	layers []bulkLayer
}

// image returns a version with some of the layers.
func (b *bulk) image(version int, numbers ...int) (*bigImage, error) {
	l := new(bigImage)
	var layers []image.Layer
	for _, i := range numbers {
		l.layers = append(l.layers, b.layers[i])
		layers = append(layers, b.layers[i].Layer)
	}
	var err error
	l.Artifact, err = makeImage(layers, version)
	return l, err
}

// sizes returns the sizes of its layers in bytes.
func (l *bigImage) sizes() (packed, unpacked int64) {
	for _, layer := range l.layers {
		packed += layer.Size
		unpacked += layer.unpacked
	}
	return packed, unpacked
}

// String returns the size.
func (l *bigImage) String() string {
	packed, unpacked := l.sizes()
	return fmt.Sprintf("%.2f GB in %d layers (%.2f GB unpacked)", float64(packed)/1e9, len(l.layers), float64(unpacked)/1e9)
}

// hotSum returns what the probe prints for hotDir, and its size.
func (l *bigImage) hotSum() (sum string, size int) {
	h := sha256.New()
	for _, layer := range l.layers { // in the order of their names
		fmt.Fprintf(h, "/%s %d\n", layer.name, len(layer.hot))
		h.Write(layer.hot)
		size += len(layer.hot)
	}
	return fmt.Sprintf("%x", h.Sum(nil)), size
}
