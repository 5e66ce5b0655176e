// Package download fetches the blobs of images into files that outlast a failed pull and a killed
// server, so that the next pull asks only for the missing bytes. See
// docs/decisions/0032-downloads.md.
//
// A file is named after the digest of its blob and the registry. Nothing is recorded about it: its
// bytes are taken for the beginning of the blob until the digest of the whole says otherwise, and
// nobody reads them before that. Bytes are added to a file and never changed.
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
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/pull/pullerror"
)

// Source is where a pull gets its blobs, with its own credentials.
type Source interface {
	// Whole asks the registry for a blob.
	Whole(ctx context.Context, blob types.BlobInfo) (io.ReadCloser, error)
	// Part asks the registry for length bytes from an offset on, or for all of the rest if length
	// is 0. When it returns, the registry has agreed to send them. The error is
	// errors.ErrUnsupported if it sends no parts.
	Part(ctx context.Context, blob types.BlobInfo, from, length int64) (io.ReadCloser, error)
	// Guard wraps a blob whose bytes come in order, and ends it where they exceed a limit.
	Guard(ctx context.Context, blob types.BlobInfo, stream io.ReadCloser) io.ReadCloser
	// Answer names the answers to requests for blobs: by whom they are given.
	Answer() string
	// Mirrored reports whether a request that fails is made again to another registry, as are all
	// later ones.
	Mirrored() bool
}

// Watcher observes how a blob arrives.
type Watcher struct {
	Begins  func()                                // it is the blob's turn
	Resumed func(bytes int64)                     // bytes that the file had
	Came    func(bytes int64)                     // bytes from the registry, also ahead of missing ones
	Shown   func(file *os.File, size int64) error // size bytes of the file may be read; Fetch ends with its error
	// Whole is called with the file when the whole blob is in it; it may be nil. The file never
	// changes again, so it may be kept by a link. Fetch ends with the error of Whole.
	Whole func(file *os.File) error

	// Connections is called with 1 for each connection that is made, and -1 for each that ends, by
	// any goroutine.
	Connections func(change int)

	// Decrypted says that the source decrypts the blob, which keeps its size, and checks its
	// digest, with ErrDiffers. Such a blob is not kept.
	Decrypted bool
}

// Pull is the downloads of one pull.
type Pull struct {
	dir      *Dir
	registry string

	mu       sync.Mutex
	parts    map[digest.Digest]*part
	former   []*part  // replaced by others; other calls of Fetch may use them
	reserved []string // names of files that are kept for this pull

	connections atomic.Int64 // under way
	narrow      atomic.Bool  // blobs come over one connection each from now on
	failed      atomic.Bool  // a registry has not sent what it was asked for
}

// Failed reports whether a registry has failed to send a blob that this pull has asked for.
func (p *Pull) Failed() bool { return p.failed.Load() }

// noteFailure notes that a request has failed while the pull wanted its answer.
func (p *Pull) noteFailure(ctx context.Context, err error) {
	if err != nil && ctx.Err() == nil {
		p.failed.Store(true)
	}
}

// Begin begins the downloads of a pull from a registry. Other pulls from that registry wait for a
// blob that this pull fetches; pulls from other registries fetch it themselves, so that a slow
// registry does not delay them.
func (d *Dir) Begin(registry string) *Pull {
	return &Pull{dir: d, registry: registry, parts: map[digest.Digest]*part{}}
}

// Fetch fetches a blob into a file. It returns nil when the whole blob has been shown, with the
// size and the digest of info. If the file was empty, bytes are shown as they come. Otherwise they
// are shown when the whole has its digest, since the bytes of the file may be damaged, or made up
// by somebody.
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

// turn waits until no other pull fetches the blob, or until the other pull gets nothing and the
// disk has room for a second copy. With alone it does not wait.
func (p *Pull) turn(ctx context.Context, info types.BlobInfo, alone bool) (*part, error) {
	part, err := p.part(info, alone)
	if err != nil {
		return nil, err
	}
	select {
	case part.turn <- struct{}{}:
		return part, nil
	default:
	}
	wait := trace.Waiting{Name: "wait for other pull", For: "another pull that downloads layer " + info.Digest.String(), Patient: true}
	err = trace.Wait(ctx, wait, func(ctx context.Context) (err error) {
		part, err = p.awaitTurn(ctx, info, part)
		return err
	})
	return part, err
}

// awaitTurn waits for the turn to fetch a blob whose file is part.
func (p *Pull) awaitTurn(ctx context.Context, info types.BlobInfo, part *part) (_ *part, err error) {
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

// part returns the file of a blob until the pull ends. With alone no other pull has that file.
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

// Unpacked allows the directory to delete a blob before the pull ends, if the disk is full.
func (p *Pull) Unpacked(blob digest.Digest) {
	p.mu.Lock()
	unpacked := p.parts[blob]
	p.mu.Unlock()
	if unpacked != nil {
		p.dir.unpacked(unpacked)
	}
}

// End ends the downloads of a pull, after all calls of Fetch have returned. If the pull has failed
// with an error that the next pull may not get, its files are kept, within the limits of the
// directory. On a full disk all files that no pull needs are deleted.
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

// chunks are buffers of that size. Otherwise they would be nearly all that the pull of an image with many layers allocates.
var chunks = sync.Pool{New: func() any { return new([chunk]byte) }}

// maxResumes bounds how often a pull connects again after a broken connection, if each connection
// brings some bytes. Each time the whole file is read again.
const maxResumes = 8

// maxFruitless is how many turns in a row may get no missing byte of a file before the blob is
// fetched in another way.
const maxFruitless = 2

// fetch is a pull's turn to fetch a blob.
type fetch struct {
	pull  *Pull
	dir   *Dir
	part  *part
	src   Source
	info  types.BlobInfo
	watch Watcher

	stored int64 // bytes that the file had
	have   int64 // of those, bytes that the registry is not asked for
	rest   *rest // what the registry sends; nil before

	telling sync.Mutex
	read    int64 // bytes from the beginning of the blob
	ahead   int64 // bytes that have come and have not been read
	told    int64 // bytes reported to the watcher
}

// ErrDiffers says that a blob or manifest has another digest or size. The registry is to blame, or what answers in its
// place.
var ErrDiffers = pullerror.Explained(fmt.Errorf("not what was asked for: a proxy, a mirror or the registry has changed it; look at these, or push the image again: %w", fault.Unavailable))

// Differs returns the error of a blob that differs, as text says, from what its manifest names: ErrDiffers, or what
// the answer is instead, if its first bytes say so.
func Differs(answer string, head []byte, total int64, text string) error {
	if what, do := pullerror.Instead(head, total); what != "" {
		return insteadError{fmt.Sprintf("%s %s; %s", answer, what, do)}
	}
	if IsArchive(head) { // some take Content-Encoding: gzip for the type of a file
		text += ", a tar archive without compression"
	}
	return fmt.Errorf("%s: %w", text, ErrDiffers)
}

// ArchiveHead is how many bytes IsArchive needs.
const ArchiveHead = 512

// IsArchive reports whether something that begins with head is a tar archive, without compression.
func IsArchive(head []byte) bool { return len(head) >= ArchiveHead && string(head[257:262]) == "ustar" }

// insteadError is an ErrDiffers that says what has come instead.
type insteadError struct{ text string }

func (e insteadError) Error() string { return e.text }
func (insteadError) Unwrap() error   { return ErrDiffers }

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

// told returns the text of a registry's error for the log, without addresses that contain a
// signature.
func told(err error) string {
	if err == nil {
		return ""
	}
	return pullerror.Cut(pullerror.Redact(fault.Text(err)))
}

// wrong reports whether an error means that the bytes of the file are useless.
func wrong(err error) bool {
	return errors.Is(err, ErrDiffers) || errors.Is(err, errors.ErrUnsupported) || errors.Is(err, fault.Invalid) || errors.Is(err, fault.Exhausted)
}

// brokenOff reports whether an error is that of a connection that has broken off.
func brokenOff(err error) bool {
	return errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.ECONNRESET)
}

// cut reports whether an error is a broken connection that may be made again.
func cut(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == nil && !fault.DiskFull(err) && !wrong(err)
}

// whole fetches the whole blob. why is the reason if the file has a part of it.
func (f *fetch) whole(ctx context.Context, why error) error {
	main, err := f.src.Whole(ctx, f.info)
	if err != nil {
		f.pull.noteFailure(ctx, err)
		return err
	}
	stream := f.open(ctx, main, 0)
	defer stream.Close()
	if f.stored > 0 { // not before the answer: a pull that may not have the blob deletes nothing
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

// resume fetches the missing bytes, at least one, so that the registry decides whether this pull
// may have the others. came reports whether the registry sent any.
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
		f.pull.noteFailure(ctx, err)
		return false, err
	}
	stream := f.open(ctx, main, f.have)
	defer stream.Close()
	slog.InfoContext(ctx, "resuming download", "digest", f.info.Digest, "bytes", f.have, "of", f.info.Size)
	return f.receive(ctx, stream)
}

// open returns the blob: the bytes of the file up to an offset, and from there on what the registry
// sends over main.
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

// receive reads the blob, whose beginning may come from the file, and adds missing bytes to the
// file. came reports whether the registry sent anything.
func (f *fetch) receive(ctx context.Context, stream io.Reader) (came bool, err error) {
	digester := f.info.Digest.Algorithm().Digester()
	array := chunks.Get().(*[chunk]byte)
	defer chunks.Put(array)
	buffer := array[:]
	var at int64
	var head []byte
	for err == nil {
		var n int
		if n, err = f.fill(buffer, stream, at); n == 0 {
			break
		}
		head = append(head, buffer[:min(n, pullerror.MaxHead-len(head))]...)
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
		f.pull.noteFailure(ctx, err)
		return came, err
	case f.info.Size > 0 && at != f.info.Size:
		return came, f.differs(head, at, fmt.Sprintf("the registry sent %d bytes instead of the %d in the manifest", at, f.info.Size))
	case digester.Digest() != f.info.Digest && !f.watch.Decrypted:
		return came, f.differs(head, at, fmt.Sprintf("the registry sent content with another digest, %s", digester.Digest()))
	case f.stored > 0:
		return came, f.watch.Shown(f.part.file, at)
	}
	return came, nil
}

func (f *fetch) differs(head []byte, total int64, text string) error {
	return Differs(f.src.Answer(), head, total, text)
}

// fill fills the buffer, which begins at an offset of the blob.
func (f *fetch) fill(buffer []byte, stream io.Reader, at int64) (n int, err error) {
	for n < len(buffer) && err == nil {
		var m int
		m, err = stream.Read(buffer[n:])
		n += m
		f.tell(at + int64(n))
	}
	return n, err
}

// tell notes that the blob has been read up to an offset.
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

// tellAhead notes a change in the number of bytes that have come ahead of missing ones.
func (f *fetch) tellAhead(bytes int64) {
	f.telling.Lock()
	defer f.telling.Unlock()
	f.ahead += bytes
	if bytes > 0 {
		f.part.came.Add(bytes)
		f.tellCome()
	}
}

// tellCome reports to the watcher that bytes have come, each byte once. For bytes that come or are
// read again it reports 0, as a sign of life.
func (f *fetch) tellCome() {
	come := f.read + f.ahead
	f.watch.Came(max(come-f.told, 0))
	f.told = max(come, f.told)
}

// write adds bytes that begin at an offset of the blob to the file, without those that it has.
func (f *fetch) write(bytes []byte, at int64) error {
	if known := min(max(f.stored-at, 0), int64(len(bytes))); known > 0 {
		if at+known > f.have { // some bytes were fetched again
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
