// Package download fetches the blobs of images into files that outlast a failed pull and
// a killed server, so that the next pull asks only for what is missing. See
// docs/decisions/0032-downloads.md.
//
// A file is named after the digest of its blob and the registry. Nothing is recorded about it: what it has is
// the beginning of the blob until the digest of the whole says otherwise, and is shown to
// nobody before that. Bytes are added to a file and never changed.
package download

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/pull/pullerror"
)

// Source is where a pull gets its blobs from, with its own credentials.
type Source interface {
	// Whole asks the registry for a blob.
	Whole(ctx context.Context, blob types.BlobInfo) (io.ReadCloser, error)
	// Part asks for length bytes from an offset on, or for all of the rest if length is 0. The
	// registry has agreed to send them. The error is errors.ErrUnsupported if it sends no parts.
	Part(ctx context.Context, blob types.BlobInfo, from, length int64) (io.ReadCloser, error)
	// Guard passes on a blob, all of whose bytes come in order, as far as it may come in.
	Guard(ctx context.Context, blob types.BlobInfo, stream io.ReadCloser) io.ReadCloser
	// Mirrored reports whether there is another registry that a request which fails is made to,
	// and then all others.
	Mirrored() bool
}

// Watcher is told how a blob arrives.
type Watcher struct {
	Begins  func()                                // its turn has come
	Resumed func(bytes int64)                     // that were here
	Came    func(bytes int64)                     // from the registry, those that are ahead of others included
	Shown   func(file *os.File, size int64) error // the file has so many bytes that may be read; Fetch ends with its error
	// Whole is called with the file when all of the blob is in it; nil: it is not. Who links the
	// file to another name keeps it: it never changes again. Fetch ends with its error.
	Whole func(file *os.File) error

	// Connections is told of each connection that is made, 1, and that ends, -1; by any goroutine.
	Connections func(change int)

	// Decrypted says that the source decrypts the blob, which has the same size then, and
	// checks its digest, as ErrDiffers says. Nothing of that is kept.
	Decrypted bool
}

// Pull is the downloads of one pull.
type Pull struct {
	dir      *Dir
	registry string

	mu       sync.Mutex
	parts    map[digest.Digest]*part
	former   []*part  // that others have replaced; other calls of Fetch may use them
	reserved []string // names of files that stay for this pull

	connections atomic.Int64 // under way
	narrow      atomic.Bool  // the registry has no use for more than one for a blob
}

// Begin begins the downloads of a pull from a registry. Other pulls from that registry
// wait for a blob that this one fetches; those from other registries fetch it themselves:
// a slow registry must not keep them.
func (d *Dir) Begin(registry string) *Pull {
	return &Pull{dir: d, registry: registry, parts: map[digest.Digest]*part{}}
}

// Fetch fetches a blob into a file. It returns nil when all of it has been shown and has the
// size and the digest of info. Of a blob that was not here at all, bytes are shown as they
// come; others are shown when the whole has its digest, since they may be damaged, or
// somebody else's.
func (p *Pull) Fetch(ctx context.Context, src Source, info types.BlobInfo, watch Watcher) error {
	part, err := p.turn(ctx, info, watch.Decrypted)
	if err != nil {
		return err
	}
	defer func() { <-part.turn }()
	watch.Begins()
	f := fetch{pull: p, dir: p.dir, part: part, src: src, info: info, watch: watch}
	if err := f.run(ctx); err != nil || watch.Whole == nil {
		return err
	}
	return watch.Whole(part.file)
}

// turn waits until no other pull fetches the blob, or the one that does so gets nothing and the
// disk has room for another copy; alone does not wait.
func (p *Pull) turn(ctx context.Context, info types.BlobInfo, alone bool) (*part, error) {
	part, err := p.part(info, alone)
	if err != nil {
		return nil, err
	}
	patience := time.NewTicker(p.dir.Patience)
	defer patience.Stop()
	for came := part.came.Load(); ; {
		select {
		case part.turn <- struct{}{}:
			return part, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-patience.C:
		}
		before := came
		if came = part.came.Load(); came == before && p.dir.hasRoom(info.Size) {
			if part, err = p.part(info, true); err != nil {
				return nil, err
			}
		}
	}
}

// part is the file of a blob, for as long as the pull lasts; alone means one that no other
// pull has.
func (p *Pull) part(info types.BlobInfo, alone bool) (*part, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	opened := p.parts[info.Digest]
	if opened != nil && !alone {
		return opened, nil
	}
	registry := p.registry
	if alone {
		registry = ""
	}
	other, err := p.dir.open(info, registry)
	if err != nil {
		return nil, fmt.Errorf("file for the download: %w", err)
	}
	if opened != nil {
		p.former = append(p.former, opened)
	}
	p.parts[info.Digest] = other
	return other, nil
}

// Unpacked allows to delete a blob before the pull ends, if room is short.
func (p *Pull) Unpacked(blob digest.Digest) {
	p.mu.Lock()
	unpacked := p.parts[blob]
	p.mu.Unlock()
	if unpacked != nil {
		p.dir.unpacked(unpacked)
	}
}

// End ends the downloads of a pull, after all calls of Fetch have returned. What has come
// is kept, within the limits of the directory, if the pull has failed with an error that
// may not come back. A full disk is cleared of all that no pull needs.
func (p *Pull) End(err error) {
	parts := slices.AppendSeq(p.former, maps.Values(p.parts))
	full := fault.DiskFull(err)
	p.dir.release(parts, p.reserved, err != nil && !full && !errors.Is(err, fault.Exhausted) && !errors.Is(err, fault.Invalid), err == nil)
	if full {
		p.dir.Clear()
	}
}

// chunk is how much is read before it is written and shown.
const chunk = 256 << 10 // bytes

// maxResumes bounds how often a connection that breaks is made again within a pull, while each
// brings some bytes. Each time all that the file has is read again.
const maxResumes = 8

// maxFruitless is how many turns in a row may get no byte of what a file lacks before the
// blob is fetched in another way.
const maxFruitless = 2

// fetch is the turn of one pull to fetch a blob.
type fetch struct {
	pull  *Pull
	dir   *Dir
	part  *part
	src   Source
	info  types.BlobInfo
	watch Watcher

	stored int64 // bytes that the file had
	have   int64 // of them that the registry is not asked for
	rest   *rest // what the registry sends; nil before

	telling sync.Mutex
	read    int64 // bytes from the beginning of the blob
	ahead   int64 // bytes that have come and are not read yet
	told    int64 // bytes that the watcher knows of
}

// ErrDiffers says that a blob has another digest or size.
var ErrDiffers = errors.New("not the blob that the manifest names")

func (f *fetch) run(ctx context.Context) (err error) {
	info, err := f.part.file.Stat()
	if err != nil {
		return err
	}
	f.stored = info.Size()
	switch {
	case f.stored == 0:
		return f.whole(ctx, nil)
	case f.stored != f.info.Size && linked(info): // nobody may add to it
		return f.whole(ctx, f.otherSize())
	}
	came, err := f.resume(ctx)
	for range maxResumes {
		if more, sizeErr := f.part.size(); sizeErr != nil || more <= f.stored || !cut(ctx, err) {
			break
		}
		_, err = f.resume(ctx)
	}
	stalled := errors.Is(context.Cause(ctx), progress.ErrStalled)
	fruitless := 0
	if ctx.Err() == nil || stalled {
		fruitless = f.dir.fruitless(f.part, came)
	}
	switch {
	case err == nil, fault.DiskFull(err), ctx.Err() != nil && !stalled:
		return err
	case !stalled && wrong(err):
		return f.whole(ctx, err)
	case fruitless < maxFruitless: // the next pull goes on
		return err
	case stalled: // or the next pull would stall as well
		return errors.Join(err, f.dir.replace(f.part))
	}
	return f.whole(ctx, err)
}

// told is what the log tells of an error that a registry may have worded: no address with a
// signature in it.
func told(err error) string {
	if err == nil {
		return ""
	}
	return pullerror.Cut(pullerror.Redact(err.Error()))
}

// wrong tells whether an error says that what the file has is useless.
func wrong(err error) bool {
	return errors.Is(err, ErrDiffers) || errors.Is(err, errors.ErrUnsupported) || errors.Is(err, fault.Invalid) || errors.Is(err, fault.Exhausted)
}

// cut tells whether an error is that of a connection that may be made again.
func cut(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == nil && !fault.DiskFull(err) && !wrong(err)
}

// whole fetches all of the blob; why is the reason if the file has a part.
func (f *fetch) whole(ctx context.Context, why error) error {
	main, err := f.src.Whole(ctx, f.info)
	if err != nil {
		return err
	}
	stream := f.open(ctx, main, 0)
	defer stream.Close()
	if f.stored > 0 { // not before: who may not have the blob deletes nothing
		slog.WarnContext(ctx, "cannot resume download, fetching the whole layer", "digest", f.info.Digest, "bytes", f.stored, "err", told(why))
		if err := f.dir.replace(f.part); err != nil {
			return err
		}
	}
	f.stored, f.have, f.read, f.told = 0, 0, 0, 0
	_, err = f.receive(ctx, stream)
	if errors.Is(err, ErrDiffers) {
		err = errors.Join(err, f.dir.replace(f.part))
	}
	return err
}

// resume fetches what the file lacks: one byte at least, so that the registry decides
// whether this pull may have the others. came tells whether it sent any.
func (f *fetch) resume(ctx context.Context) (came bool, err error) {
	if f.stored, err = f.part.size(); err != nil {
		return false, err
	}
	if f.stored > f.info.Size {
		return false, f.otherSize()
	}
	f.have = min(f.stored, f.info.Size-1)
	main, err := f.src.Part(ctx, f.info, f.have, 0)
	if err != nil {
		return false, err
	}
	stream := f.open(ctx, main, f.have)
	defer stream.Close()
	slog.InfoContext(ctx, "resuming download", "digest", f.info.Digest, "bytes", f.have, "of", f.info.Size)
	return f.receive(ctx, stream)
}

// open returns the blob: what the file has before an offset, and what the registry sends from
// there on over main.
func (f *fetch) open(ctx context.Context, main io.ReadCloser, from int64) io.ReadCloser {
	f.rest = f.newRest(ctx, main, from)
	return f.src.Guard(ctx, f.info, struct {
		io.Reader
		io.Closer
	}{io.MultiReader(io.NewSectionReader(f.part.file, 0, from), f.rest), f.rest})
}

func (f *fetch) otherSize() error {
	return fmt.Errorf("the file has %d bytes instead of %d: %w", f.stored, f.info.Size, ErrDiffers)
}

// receive reads the blob, the beginning of which may come from the file, and adds to the file
// what is not there. came tells whether the registry sent anything.
func (f *fetch) receive(ctx context.Context, stream io.Reader) (came bool, err error) {
	digester := f.info.Digest.Algorithm().Digester()
	buffer := make([]byte, chunk)
	var at int64
	for err == nil {
		var n int
		if n, err = f.fill(buffer, stream, at); n == 0 {
			break
		}
		_, _ = digester.Hash().Write(buffer[:n]) // never fails
		if writeErr := f.write(buffer[:n], at); writeErr != nil {
			return at > f.have, writeErr
		}
		at += int64(n)
		f.part.came.Add(int64(n))
		if f.stored == 0 {
			if shownErr := f.watch.Shown(f.part.file, at); shownErr != nil {
				return true, shownErr
			}
		}
	}
	came = at > f.have
	switch {
	case ctx.Err() != nil:
		return came, context.Cause(ctx)
	case !errors.Is(err, io.EOF):
		return came, err
	case f.info.Size > 0 && at != f.info.Size:
		return came, fmt.Errorf("the registry sent %d bytes instead of the %d in the manifest: %w", at, f.info.Size, ErrDiffers)
	case digester.Digest() != f.info.Digest && !f.watch.Decrypted:
		return came, fmt.Errorf("the registry sent content with another digest, %s: %w", digester.Digest(), ErrDiffers)
	case f.stored > 0:
		return came, f.watch.Shown(f.part.file, at)
	}
	return came, nil
}

// fill reads as much as the buffer holds, which begins at an offset of the blob.
func (f *fetch) fill(buffer []byte, stream io.Reader, at int64) (n int, err error) {
	for n < len(buffer) && err == nil {
		var m int
		m, err = stream.Read(buffer[n:])
		n += m
		f.tell(at + int64(n))
	}
	return n, err
}

// tell notes that the blob was read up to an offset.
func (f *fetch) tell(upTo int64) {
	f.telling.Lock()
	defer f.telling.Unlock()
	if known := min(upTo, f.have) - f.told; known > 0 {
		f.watch.Resumed(known)
		f.told += known
	}
	f.read = upTo
	f.tellCome()
}

// tellAhead notes bytes that have come ahead of those that are read, or less of them.
func (f *fetch) tellAhead(bytes int64) {
	f.telling.Lock()
	defer f.telling.Unlock()
	f.ahead += bytes
	if bytes > 0 {
		f.part.came.Add(bytes)
		f.tellCome()
	}
}

// tellCome has the watcher know of bytes that have come, of each once: those that come or are
// read again are a sign of life alone.
func (f *fetch) tellCome() {
	come := f.read + f.ahead
	f.watch.Came(max(come-f.told, 0))
	f.told = max(come, f.told)
}

// write adds bytes to the file, which begin at an offset of the blob. Those that it has stay.
func (f *fetch) write(bytes []byte, at int64) error {
	if known := min(max(f.stored-at, 0), int64(len(bytes))); known > 0 {
		if at+known > f.have { // a byte that was fetched again
			last := at + known - 1
			if same, err := f.part.has(bytes[known-1], last); err != nil || !same {
				return errors.Join(err, fmt.Errorf("the registry sent another last byte than the file has: %w", ErrDiffers))
			}
		}
		bytes, at = bytes[known:], at+known
	}
	_, err := f.part.file.WriteAt(bytes, at)
	if !fault.DiskFull(err) {
		return err
	}
	if shrunk := f.rest.shrink(); f.dir.Clear() || shrunk {
		_, err = f.part.file.WriteAt(bytes, at)
	}
	return err
}
