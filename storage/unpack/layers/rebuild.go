package layers

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/opencontainers/go-digest"
	"github.com/vbatts/tar-split/tar/asm"
	tarsplit "github.com/vbatts/tar-split/tar/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/storage/unpack/gunzip"
)

// ErrNotRebuilt says that a stored layer does not give the content from which it was made: its
// files or its tar-split data have changed, or have a form that tar-split does not cover, such as
// sparse files. Neither the image nor the registry is to blame.
var ErrNotRebuilt = errors.New("cannot be rebuilt")

// Recall returns the content of a stored layer as Rebuild does. All errors of the reader are
// ErrNotRebuilt; so is a wrong digest, which it finds at the end.
func Recall(layer *Stored) io.ReadCloser {
	r := &recalled{ReadCloser: Rebuild(layer.Place, layer.Size), id: layer.ID, want: layer.Content}
	if r.want.Validate() == nil {
		r.digester = r.want.Algorithm().Digester()
	}
	return r
}

type recalled struct {
	io.ReadCloser
	id       string
	want     digest.Digest
	digester digest.Digester // nil: the digest of the content is not recorded
}

// Read implements io.Reader.
func (r *recalled) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if r.digester != nil {
		_, _ = r.digester.Hash().Write(p[:n]) // never fails
	}
	if errors.Is(err, io.EOF) && r.digester != nil {
		if got := r.digester.Digest(); got != r.want {
			err = fmt.Errorf("its content has the digest %s, not %s", got, r.want)
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		err = fmt.Errorf("layer %s in the image store %w: %w", r.id, ErrNotRebuilt, err)
	}
	return n, err
}

// Rebuild returns the uncompressed content of a stored layer, rebuilt from its files and from the
// data that containers/storage has recorded of the archive (tar-split). It has at most size bytes,
// unless that is 0.
//
// The store's own Diff follows links in the names of files to anywhere on the node, opens fifos and
// devices, and holds the store's lock meanwhile. Rebuild resolves names below the layer's
// directory, as when the layer was unpacked, opens only regular files, reads no more than the layer
// has, and locks nothing: if the layer is deleted meanwhile, the reader fails.
func Rebuild(at Place, size int64) io.ReadCloser {
	from, to := io.Pipe()
	go func() { _ = to.CloseWithError(rebuild(at, size, to)) }() // never fails
	return from
}

func rebuild(at Place, size int64, to io.Writer) error {
	description, err := at.describe()
	if err != nil {
		return err
	}
	defer description.Close()
	dir, err := unix.Open(at.Files, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: at.Files, Err: err}
	}
	defer unix.Close(dir)
	if size > 0 {
		to = &bounded{to, size}
	}
	return asm.WriteOutputTarStream(layerFiles(dir), newEntries(description), to)
}

// describe opens the description of a layer's archive.
func (at Place) describe() (io.ReadCloser, error) {
	if at.Split == "" {
		return nil, errors.New("the description of its archive (tar-split) is missing")
	}
	file, err := os.Open(at.Split)
	if err != nil {
		return nil, err
	}
	return closers{gunzip.NewReader(file), file}, nil
}

// closers closes a reader, and then what it reads from.
type closers struct {
	io.ReadCloser
	from io.Closer
}

// Close implements io.Closer.
func (c closers) Close() error { return errors.Join(c.ReadCloser.Close(), c.from.Close()) }

// entries unpacks tar-split data. The library's unpacker keeps all names in memory, as many and as
// long as the image has them, to refuse duplicates, which the packer has refused before.
//
// The worker that has written the data may have been taken over by a layer: an entry has a bound.
type entries struct {
	*json.Decoder
	from *io.LimitedReader
}

// maxEntry is the maximum size of an entry, in bytes. One that extract.Layer makes has the headers of a file, 8 MiB at
// most, in base64.
const maxEntry = 32 << 20

func newEntries(description io.Reader) entries {
	from := &io.LimitedReader{R: description}
	return entries{json.NewDecoder(from), from}
}

// Next implements tarsplit.Unpacker.
func (e entries) Next() (*tarsplit.Entry, error) {
	var next tarsplit.Entry
	e.from.N = maxEntry
	err := e.Decode(&next)
	if e.from.N == 0 {
		return nil, fmt.Errorf("the description of its archive (tar-split) has an entry of more than %d bytes", maxEntry)
	}
	if err != nil {
		return nil, err
	}
	return &next, nil
}

// bounded accepts left bytes.
type bounded struct {
	io.Writer
	left int64
}

// Write implements io.Writer.
func (b *bounded) Write(p []byte) (int, error) {
	if b.left -= int64(len(p)); b.left < 0 {
		return 0, errors.New("it has grown")
	}
	return b.Writer.Write(p)
}

// layerFiles opens the regular files below a directory.
type layerFiles int

// Get implements tarsplit.FileGetter.
func (dir layerFiles) Get(name string) (io.ReadCloser, error) {
	return regular.OpenBelow(int(dir), name)
}
