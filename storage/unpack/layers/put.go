package layers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/unpack/extract"
)

// Put adds the missing layers of an image to the store. It downloads several at a time, unpacks
// several at a time, each while it arrives, and adds them from the lowest one up. A layer is added
// only if its blob and its content have their digests. Layers that were added before an error stay.
// If the store has the content of a layer elsewhere, the layer is rebuilt from there or, if that
// fails, downloaded.
//
// A layer that the store has under its id is not downloaded. Whether the image may use it,
// containers/image checks by the digest of the blob.
func (in *Intake) Put(ctx context.Context, image []Missing) error {
	ctx, cancel := context.WithCancelCause(ctx)
	p := &put{
		Intake: in, ctx: ctx, cancel: cancel, steps: in.plan(image),
		downloading: make(chan struct{}, in.Parallel), unpacking: make(chan struct{}, in.Unpack), largeWindow: make(chan struct{}, 1),
	}
	missing := slices.DeleteFunc(slices.Clone(p.steps), func(s *step) bool { return s.present })
	p.work.Go(func() { p.download(missing) })
	p.work.Go(p.unpack)
	err := p.addAll()
	cancel(nil)
	p.work.Wait()
	for _, s := range p.steps {
		s.blob.close()
		if s.staged != nil {
			err = errors.Join(err, s.staged.Drop())
		}
	}
	return err
}

// put is one call of Put.
type put struct {
	*Intake
	ctx    context.Context //nolint:containedctx // of the call
	cancel context.CancelCauseFunc
	steps  []*step
	work   sync.WaitGroup

	changing sync.Mutex // of present and blob of a step

	// Semaphores. Their order is that of the layers, so that none waits for a later one.
	downloading, unpacking chan struct{}
	largeWindow            chan struct{} // for decoders that need much memory
}

// take takes a place in a semaphore. The error is that of the context.
func (p *put) take(places chan struct{}) error {
	select {
	case places <- struct{}{}:
		return nil
	case <-p.ctx.Done():
		return context.Cause(p.ctx)
	}
}

// download downloads blobs in their order.
func (p *put) download(steps []*step) {
	for _, s := range steps {
		if err := p.take(p.downloading); err != nil {
			s.blob.end(err)
			continue
		}
		p.work.Go(func() {
			defer func() { <-p.downloading }()
			s.blob.end(p.fetch(p.ctx, s))
		})
	}
}

// unpack unpacks the layers beside the store. A layer that repeats an earlier one waits until that
// is in the store: only then it is known whether it may be unpacked again, and from what.
func (p *put) unpack() {
	for i, s := range p.steps {
		if s.like != nil {
			p.work.Go(func() {
				select {
				case <-p.steps[i-1].added:
				case <-p.ctx.Done():
				}
				p.unpackOne(s, p.take(p.unpacking))
			})
			continue
		}
		err := p.take(p.unpacking)
		p.work.Go(func() { p.unpackOne(s, err) })
	}
}

// unpackOne unpacks a layer, and gives up a place in the semaphore, unless there was none.
func (p *put) unpackOne(s *step, err error) {
	defer close(s.ready)
	if err != nil {
		s.err = err
		return
	}
	defer func() { <-p.unpacking }()
	if has, err := p.Into.Has(s.ID); has || err != nil { // another pull was faster
		s.err = err
		return
	}
	if s.err = p.Into.CheckRepeat(s.DiffID); s.err == nil && s.present {
		s.err = p.recallTo(s)
	}
	if s.err == nil {
		s.staged, s.err = p.stage(s)
	}
	if errors.Is(s.err, fault.Invalid) && !errors.Is(s.err, ErrNotRebuilt) {
		p.cancel(s.wrap(s.err)) // however long the layers below it take, the image stays invalid
	}
}

// recallTo makes the content of a stored layer a step's blob.
func (p *put) recallTo(s *step) error {
	err := recall(s.source(), s.blob)
	if err != nil {
		s.blob.end(err) // nobody else ends it, and it may be read once more
	}
	return err
}

// stage unpacks a layer. It can be called again.
func (p *put) stage(s *step) (Staged, error) {
	c, err := s.open(p.ctx, p.largeWindow)
	if err != nil {
		return nil, p.blame(s, err)
	}
	defer c.Close()
	staged, err := p.Into.Stage(p.ctx, c, p.blobs)
	twice := errTwice(c.head)
	if errors.Is(err, extract.ErrNoArchive) || err != nil && (c.failed != nil || twice != nil) {
		return nil, p.blame(s, cmp.Or(twice, err))
	}
	if err == nil && !c.checked {
		return nil, errors.Join(errors.New("it was not unpacked to its end"), staged.Drop())
	}
	return staged, err
}

// blame returns the error of a layer that cannot be decompressed or is no archive. It waits for the rest of the
// blob, since an image is to blame only for the bytes that its manifest names.
func (p *put) blame(s *step, err error) error {
	if _, changed := s.blob.whole(); changed != nil {
		return changed
	}
	switch {
	case p.ctx.Err() != nil, errors.Is(err, fault.Invalid), errors.Is(err, fault.Exhausted), errors.Is(err, io.ErrUnexpectedEOF):
		return err
	}
	return fmt.Errorf("it cannot be decompressed: %v; rebuild the image: %w", err, fault.Invalid) //nolint:errorlint // whatever it looks like
}

// blobs returns the bytes of all blobs, once they have come. Downloads wait for no unpacking.
func (p *put) blobs() (sum int64, err error) {
	for _, s := range p.steps {
		size := s.BlobSize()
		p.changing.Lock()
		present, blob := s.present, s.blob
		p.changing.Unlock()
		if !present {
			if size, err = blob.whole(); err != nil {
				return 0, err
			}
		}
		sum += size
	}
	return sum, nil
}

// together is how many bytes of blobs are added to the store at once. An interrupted pull has to
// unpack no more than that again.
const together = 32 << 20

// addAll adds the layers to the store, from the lowest one up.
func (p *put) addAll() error {
	for rest := p.steps; len(rest) > 0; {
		added, err := p.add(rest)
		rest = rest[added:]
		if err == nil {
			continue
		}
		if p.ctx.Err() != nil {
			return context.Cause(p.ctx)
		}
		if err := p.addAgain(rest[0], err); err != nil {
			return rest[0].wrap(err)
		}
		rest = rest[1:]
	}
	return nil
}

// add adds the first of the layers when it is unpacked, and with it small ones above it that have arrived, since most of the
// work is the same for one layer and for many. It returns how many the store has now, and the
// error of the next one.
func (p *put) add(steps []*step) (added int, err error) {
	var ready []Addition
	bytes := int64(0)
	for i, s := range steps {
		if bytes += s.Size; i > 0 && (bytes > together || !s.arrived()) {
			break
		}
		<-s.ready
		if err = s.err; err != nil {
			break
		}
		ready = append(ready, Addition{s.staged, s.ID, s.Parent, Record{Blob: s.Blob, Size: s.BlobSize(), Content: s.DiffID}})
	}
	if p.ctx.Err() != nil {
		return 0, context.Cause(p.ctx)
	}
	places, addErr := p.Into.Add(p.ctx, ready)
	for i, place := range places {
		p.finish(steps[i], place)
	}
	return len(places), cmp.Or(addErr, err)
}

// arrived reports whether a layer has only to be unpacked: nothing else is waited for, neither a registry nor the layers below.
func (s *step) arrived() bool { return s.like == nil && s.blob.ended() }

// addAgain adds a layer after a failure, if another attempt may help: its directory was swept, or the store could
// not give it and it is downloaded instead.
func (p *put) addAgain(s *step, err error) error {
	const attempts = 3
	for attempt := 1; err != nil; attempt++ {
		switch {
		case s.present && errors.Is(err, ErrNotRebuilt):
			if p.Lost != nil {
				p.Lost(s.Layer, err)
			}
			s.blob.close()
			p.changing.Lock()
			s.present, s.blob = false, newSpool(p.Dir)
			p.changing.Unlock()
			p.download([]*step{s})
		case attempt == attempts || !swept(err):
			return err
		}
		if s.staged != nil {
			if err := s.staged.Drop(); err != nil {
				return err
			}
		}
		s.staged, s.err = p.stage(s)
		_, err = p.add([]*step{s})
	}
	return nil
}

// finish ends a step whose layer is in the store.
func (p *put) finish(s *step, place Place) {
	s.blob.close()
	s.place = place
	if !s.present && p.Added != nil {
		p.Added(s.Layer)
	}
	close(s.added)
}

// wrap says of which layer an error is.
func (s *step) wrap(err error) error {
	layer := fmt.Sprintf("layer %s: ", s.Blob)
	if strings.HasPrefix(err.Error(), layer) { // the server has said it
		return err
	}
	return fmt.Errorf("%s%w", layer, err)
}
