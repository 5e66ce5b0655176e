package download

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/storage/pull/pullerror"
)

// rangeSize is the size of one request: so large that the latency of the answer does not matter,
// and so small that slow connections do not delay fast ones.
const rangeSize = 16 << 20 // bytes

// rangesAhead is how many ranges may be ahead for each connection that a pull may have.
const rangesAhead = 2

// unpacked is how many times the size of a layer must be free on the disk for ranges ahead: other
// blobs and the content of layers need room as well.
const unpacked = 4

// overlap is how many bytes before a range are fetched with it and compared, because the library
// does not say which part of the blob an answer contains.
const overlap = 4 << 10

// maxMissed bounds how many ranges of a blob may be missing when they are due.
const maxMissed = 3

// maxAsks bounds how often a range is asked for.
const maxAsks = 3

// askAgainAfter is the pause before a range is asked for again. For the main connection it doubles
// each time.
const askAgainAfter = time.Second

// maxMainAsks bounds how often the rest is asked for, over 15 seconds.
const maxMainAsks = 5

// rest reads the bytes that a registry sends of a blob from an offset on, in order.
//
// They come over the main connection, which was asked for all of them. If there are many, other
// connections fetch ranges ahead, into a file without a name, as many as the pull may have. Where a
// range begins that has come, at least in part, the main connection ends. Where a range is missing,
// the main connection goes on, or is made again. So a registry that refuses ranges, or is not
// faster over more connections, sends everything over the main connection.
type rest struct {
	ctx    context.Context // of the connections
	cancel context.CancelFunc
	fetch  *fetch
	size   int64 // of a range; 0: nothing is fetched ahead
	window int64 // ranges for which there is room

	at     int64         // offset of the next byte to read
	before []byte        // bytes before that, up to overlap, as long as they may be needed
	main   io.ReadCloser // from at on; nil: there is none
	made   int           // how often the main connection was made again
	madeAt int64         // the last time at this offset

	scratch *os.File // has range n at slot n modulo window; nil if nothing is fetched ahead
	ranges  map[int64]*blobRange
	next    int64      // number of the range to be begun
	probe   *blobRange // the first range, which shows whether the registry sends ranges
	late    int        // ranges that were missing when they were due
	running sync.WaitGroup
	ended   chan struct{} // a range has ended
}

// newRest returns the bytes from an offset on, which main was asked for.
func (f *fetch) newRest(ctx context.Context, main io.ReadCloser, from int64) *rest {
	r := &rest{fetch: f, at: from, main: main, ranges: map[int64]*blobRange{}, ended: make(chan struct{}, 1)}
	r.ctx, r.cancel = context.WithCancel(ctx)
	f.connected()
	left, size, window := f.info.Size-from, f.dir.RangeSize, rangesAhead*f.dir.Connections.Load()
	if f.dir.Connections.Load() < 2 || f.src.Mirrored() || left < 2*size || !f.dir.hasRoom(unpacked*left+size*window) {
		return r
	}
	var err error
	if r.scratch, err = f.dir.scratch(); err != nil {
		r.narrow(err)
		return r
	}
	r.size, r.window = size, window
	return r
}

// connected and disconnected count the connections of the pull.
func (f *fetch) connected() {
	f.pull.connections.Add(1)
	f.watch.Connections(1)
}

func (f *fetch) disconnected() {
	f.pull.connections.Add(-1)
	f.watch.Connections(-1)
}

// takeConnection counts one more connection, if the pull may have it.
func (f *fetch) takeConnection() bool {
	if f.pull.narrow.Load() {
		return false
	}
	if f.pull.connections.Add(1) > f.dir.Connections.Load() {
		f.pull.connections.Add(-1)
		return false
	}
	f.watch.Connections(1)
	return true
}

// Read implements io.Reader.
func (r *rest) Read(p []byte) (n int, err error) {
	for n == 0 && err == nil && len(p) > 0 {
		if r.ctx.Err() != nil { // bytes that came ahead need not be read any more
			return 0, context.Cause(r.ctx)
		}
		b, come := r.current()
		if b == nil && r.main == nil {
			if b, err = r.goOn(); err != nil {
				break
			}
		}
		r.begin(b)
		switch {
		case b == nil:
			n, err = r.readMain(p)
		case come == 0:
			err = r.await(b)
		default:
			n, err = r.readAhead(p[:min(int64(len(p)), come)], b)
		}
		r.at += int64(n)
		if r.size > 0 || r.made == 0 {
			r.before = lastOf(r.before, p[:n])
		}
	}
	return n, err
}

// Close implements io.Closer.
func (r *rest) Close() error {
	r.cancel()
	err := r.closeMain()
	for _, b := range r.ranges {
		r.drop(b)
	}
	r.running.Wait()
	if r.scratch != nil {
		err = errors.Join(err, r.scratch.Close())
	}
	return err
}

// lastOf returns the last overlap bytes of last followed by more.
func lastOf(last, more []byte) []byte {
	last = append(last, more[max(len(more)-overlap, 0):]...)
	return slices.Delete(last, 0, max(len(last)-overlap, 0))
}

// begin begins to fetch ranges ahead of the current one. The first range must show that the
// registry sends ranges. While the main connection is in use, no range is begun that it will reach
// soon.
func (r *rest) begin(current *blobRange) {
	if r.size == 0 {
		return
	}
	number := r.at / r.size
	end := number + r.window
	if number++; current == nil {
		number++
	}
	for number = max(number, r.next); number < end && number*r.size < r.fetch.info.Size; number++ {
		if r.probe != nil && r.probe.size() == 0 || !r.fetch.takeConnection() {
			return
		}
		r.start(number)
	}
}

// start begins to fetch a range over a connection that has been counted.
func (r *rest) start(number int64) {
	from := number * r.size
	b := &blobRange{
		number: number, from: from, place: number % r.window * r.size, length: min(r.size, r.fetch.info.Size-from),
		moved: make(chan struct{}, 1), ended: make(chan struct{}),
	}
	ctx, cancel := context.WithCancel(r.ctx)
	b.cancel = cancel
	r.ranges[number], r.next = b, number+1
	if r.probe == nil {
		r.probe = b
	}
	r.running.Go(func() {
		defer notify(r.ended)
		defer close(b.ended)
		defer r.fetch.disconnected()
		defer cancel()
		err := panics.Do(ctx, "fetch range of a layer", func() error { return r.fetchRange(ctx, b) })
		if err != nil && !errors.Is(err, context.Canceled) && r.ctx.Err() == nil {
			r.narrow(err)
		}
	})
}

// narrow stops the pull from beginning ranges. Ranges that are coming are used.
func (r *rest) narrow(why error) {
	if r.fetch.pull.narrow.CompareAndSwap(false, true) {
		slog.InfoContext(r.ctx, "fetching the layers of this pull over one connection each from now on", "digest", r.fetch.info.Digest, "err", told(why))
	}
}

// missed counts a range that is missing when it is due.
func (r *rest) missed() {
	if r.late++; r.late > maxMissed {
		r.narrow(errLate)
	}
}

var (
	errOtherPart = fmt.Errorf("the registry sent another part of the layer than it was asked for: %w", ErrDiffers)
	errLate      = errors.New("the registry sends nothing over one of several connections")
)

// current returns the range that contains the next byte, and how many bytes of it can be read; nil
// if the main connection brings that byte.
func (r *rest) current() (b *blobRange, come int64) {
	if r.size == 0 {
		return nil, 0
	}
	if b = r.ranges[r.at/r.size]; b == nil {
		return nil, 0
	}
	ended := b.hasEnded() // before its bytes are counted
	come = b.size() - (r.at - b.from)
	switch {
	case come > 0 && r.at == b.from && !bytes.Equal(b.before, r.before):
		r.narrow(errOtherPart)
	case come > 0, r.main == nil && !ended:
		return b, come
	case r.main != nil:
		r.missed()
	}
	r.drop(b)
	return nil, 0
}

// await waits until more of a range has come. It gives up a range that brings nothing.
func (r *rest) await(b *blobRange) error {
	limit := time.NewTimer(r.fetch.dir.Patience)
	defer limit.Stop()
	select {
	case <-b.moved:
	case <-r.ended: // this one, or another one, which leaves a connection
	case <-limit.C:
		if r.missed(); b.size() == 0 { // the registry has not answered either
			r.narrow(errLate)
		}
		r.drop(b)
	case <-r.ctx.Done():
		return context.Cause(r.ctx)
	}
	return nil
}

// readAhead reads bytes of a range that have come.
func (r *rest) readAhead(p []byte, b *blobRange) (int, error) {
	if err := r.closeMain(); err != nil {
		slog.DebugContext(r.ctx, "cannot close connection to the registry", "err", err)
	}
	n, err := r.scratch.ReadAt(p, b.place+r.at-b.from)
	if err != nil {
		return 0, fmt.Errorf("file for ranges of the download: %w", err)
	}
	r.fetch.tellAhead(-int64(n))
	if r.at+int64(n) == b.from+b.length {
		<-b.ended // its connection is free for the next range
		delete(r.ranges, b.number)
	}
	return n, nil
}

// goOn asks for the next bytes, if they are not coming: for a range if one begins there, which it
// returns, or else for all of the rest.
func (r *rest) goOn() (*blobRange, error) {
	if r.size > 0 && r.at < r.fetch.info.Size && r.at%r.size == 0 {
		if number := r.at / r.size; number >= r.next && r.fetch.takeConnection() {
			r.start(number)
			return r.ranges[number], nil
		}
	}
	return nil, r.connectMain()
}

// connectMain makes the main connection again. It tries for some seconds, because the former main
// connection would have brought the rest, and was ended only for ranges.
func (r *rest) connectMain() error {
	if r.at == r.fetch.info.Size {
		return io.EOF
	}
	var main io.ReadCloser
	pause := askAgainAfter
	for asked := 1; ; asked++ {
		var err error
		if main, err = r.fetch.src.Part(r.ctx, r.fetch.info, r.at, 0); err == nil {
			break
		}
		if r.ctx.Err() != nil {
			return context.Cause(r.ctx)
		}
		if asked == maxMainAsks {
			// Not with the kind of the error: the registry has sent parts, which the next pull can
			// use.
			return fmt.Errorf("connect again for the rest of the layer: %v: %w", err, io.ErrUnexpectedEOF) //nolint:errorlint // see above
		}
		select {
		case <-time.After(pause):
			pause *= 2
		case <-r.ctx.Done():
		}
	}
	r.connected(main, r.at)
	return nil
}

// connected takes another main connection, which brings the bytes from an offset on.
func (r *rest) connected(main io.ReadCloser, at int64) {
	r.fetch.connected()
	r.main, r.madeAt = main, at
	r.made++
}

// readMain reads from the main connection, up to the next range. A main connection that breaks is
// made again, as long as each brings bytes.
func (r *rest) readMain(p []byte) (int, error) {
	if r.size > 0 {
		p = p[:min(int64(len(p)), r.size-r.at%r.size)]
	}
	n, err := r.main.Read(p)
	at := r.at + int64(n)
	switch {
	case err == nil, at >= r.fetch.info.Size, r.ctx.Err() != nil:
		return n, err
	case r.made == 0:
		if brokenOff(err) && at > 0 {
			err = r.replaceMain(at, lastOf(slices.Clone(r.before), p[:n]), err)
		}
		return n, err
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if at == r.madeAt || r.made > maxResumes {
		return n, err
	}
	_ = r.closeMain() // it is broken
	return n, nil
}

// replaceMain asks once for the bytes from an offset on, where the first main connection has broken. The library has
// done so too, but with the token that it had. It also asks for the bytes before them and compares these, as for
// ranges. If the rest does not come it returns broke, or the refusal of the registry.
func (r *rest) replaceMain(at int64, before []byte, broke error) error {
	main, err := r.fetch.src.Part(r.ctx, r.fetch.info, at-int64(len(before)), 0)
	switch {
	case err != nil && pullerror.LoginRefused(err):
		return err
	case err != nil:
		return broke
	}
	come := make([]byte, len(before))
	if _, err := io.ReadFull(main, come); err != nil || !bytes.Equal(come, before) {
		_ = main.Close()
		return broke
	}
	_ = r.closeMain()
	r.connected(main, at)
	return nil
}

func (r *rest) closeMain() error {
	if r.main == nil {
		return nil
	}
	err := r.main.Close()
	r.main = nil
	r.fetch.disconnected()
	return err
}

// drop ends a range.
func (r *rest) drop(b *blobRange) {
	b.cancel()
	<-b.ended
	r.fetch.tellAhead(max(r.at-b.from, 0) - b.size())
	delete(r.ranges, b.number)
	if r.probe == b && b.size() == 0 {
		r.probe = nil
	}
}

// shrink gives up the bytes that have come ahead, because the disk is full. It reports whether
// there were any.
func (r *rest) shrink() bool {
	if r.size == 0 {
		return false
	}
	r.narrow(errors.New("the disk is full"))
	for _, b := range r.ranges {
		r.drop(b)
	}
	return r.scratch.Truncate(0) == nil
}

// blobRange is a range of a blob that is fetched ahead.
type blobRange struct {
	number       int64
	from, length int64 // in the blob
	place        int64 // in the scratch file
	cancel       context.CancelFunc
	moved        chan struct{} // bytes have come
	ended        chan struct{} // no more come

	mu     sync.Mutex
	come   int64
	before []byte // bytes before from, once any have come
	last   []byte // the last bytes that came, bytes before the range included
}

// size returns how many bytes have come.
func (b *blobRange) size() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.come
}

func (b *blobRange) hasEnded() bool {
	select {
	case <-b.ended:
		return true
	default:
		return false
	}
}

// fetchRange fetches a range. Bytes from a broken connection are not asked for again.
func (r *rest) fetchRange(ctx context.Context, b *blobRange) (err error) {
	for range maxAsks {
		if err = r.askFor(ctx, b); err == nil || ctx.Err() != nil || wrong(err) || fault.DiskFull(err) {
			return err
		}
		select {
		case <-time.After(askAgainAfter):
		case <-ctx.Done():
			return err
		}
	}
	return err
}

// askFor asks for the missing bytes of a range.
func (r *rest) askFor(ctx context.Context, b *blobRange) error {
	part, err := r.fetch.src.Part(ctx, r.fetch.info, b.from+b.come-overlap, b.length-b.come+overlap)
	if err != nil {
		return err
	}
	defer part.Close()
	buffer := make([]byte, 64<<10)
	before := buffer[:overlap]
	if _, err := io.ReadFull(part, before); err != nil {
		return err
	}
	if b.come > 0 && !bytes.Equal(before, b.last) {
		return errOtherPart
	}
	b.last = bytes.Clone(before)
	if b.come == 0 {
		b.before = bytes.Clone(before) // nobody reads it before bytes have come
	}
	for b.come < b.length {
		n, err := part.Read(buffer[:min(int64(len(buffer)), b.length-b.come)])
		if n > 0 {
			if _, err := r.scratch.WriteAt(buffer[:n], b.place+b.come); err != nil {
				return err
			}
			b.last = lastOf(b.last, buffer[:n])
			b.add(int64(n))
			r.fetch.tellAhead(int64(n))
		}
		if err != nil && b.come < b.length {
			return fmt.Errorf("range of the layer: %w", err)
		}
	}
	return nil
}

// add notes bytes that have come.
func (b *blobRange) add(n int64) {
	b.mu.Lock()
	b.come += n
	b.mu.Unlock()
	notify(b.moved)
}

// notify wakes a goroutine that waits on c, or will.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
