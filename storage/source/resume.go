package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"reflect"
	"time"

	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/storage/pullerror"
)

// ResumeBlob is GetBlob of a blob that begins with have: the registry is asked for the rest
// alone, and has agreed to send it. The error is errors.ErrUnsupported if the registry, or the
// library, has no parts of blobs. have must be shorter than the blob.
func (s *Image) ResumeBlob(ctx context.Context, info types.BlobInfo, have *io.SectionReader) (io.ReadCloser, error) {
	whole, err := s.fetchFrom(ctx, info, have)
	if err != nil {
		return nil, err
	}
	return s.guard(ctx, info, whole), nil
}

// fetch asks the registry for a blob.
func (s *Image) fetch(ctx context.Context, info types.BlobInfo, cache types.BlobInfoCache) (io.ReadCloser, int64, error) {
	s.answers.Add(1)
	defer s.answers.Add(-1)
	return s.ImageSource.GetBlob(ctx, info, cache)
}

// fetchFrom is ResumeBlob without the guard.
func (s *Image) fetchFrom(ctx context.Context, info types.BlobInfo, have *io.SectionReader) (io.ReadCloser, error) {
	s.answers.Add(1)
	rest, err := blobFrom(ctx, s.ImageSource, info, uint64(have.Size()))
	s.answers.Add(-1)
	if err != nil && refusesRanges(err) {
		err = fmt.Errorf("%w: %w", errNoRanges, err)
	}
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(have, rest), rest}, nil
}

// errNoRanges says that a blob can only be fetched as a whole.
var errNoRanges = fmt.Errorf("the registry sends no parts of layers: %w", errors.ErrUnsupported)

// refusesRanges tells whether a registry has answered that it does not send the part that was
// asked for. The library's type for a bad request cannot be named outside of it.
func refusesRanges(err error) bool {
	status := pullerror.StatusOf(err)
	refused := status == http.StatusBadRequest || status == http.StatusRequestedRangeNotSatisfiable
	for ; err != nil && !refused; err = errors.Unwrap(err) {
		refused = reflect.TypeOf(err).Name() == "BadPartialRequestError"
	}
	return refused
}

// rangeTime is how long a registry may take from the header of its answer to the part that
// was asked for. The library skips the bytes before that of one that sends the whole blob,
// which may take for ever.
const rangeTime = 5 * time.Second

// blobFrom asks a registry for a blob from an offset on.
func blobFrom(ctx context.Context, src types.ImageSource, info types.BlobInfo, offset uint64) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancel(ctx)
	streams, errs, err := blobAt(ctx, src, info, offset)
	if err != nil {
		cancel()
		return nil, err
	}
	limit := time.NewTimer(rangeTime)
	defer limit.Stop()
	select {
	case stream, ok := <-streams:
		if ok {
			return &partStream{stream, cancel, streams, errs}, nil
		}
		err = errNoRanges
	case err = <-errs:
		if err == nil {
			err = errNoRanges
		}
	case <-limit.C:
		err = errNoRanges
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	cancel()
	drain(streams, errs)
	return nil, err
}

// partStream is the part of a blob that was asked for.
type partStream struct {
	io.ReadCloser
	cancel  context.CancelFunc
	streams <-chan io.ReadCloser
	errs    <-chan error
}

// Close implements io.Closer. It cancels the request first: the library reads to its end what
// it is told to close.
func (s *partStream) Close() error {
	s.cancel()
	err := s.ReadCloser.Close()
	drain(s.streams, s.errs)
	return err
}

// drain waits until the library has ended a request that was cancelled.
func drain(streams <-chan io.ReadCloser, errs <-chan error) {
	for streams != nil || errs != nil {
		select {
		case stream, ok := <-streams:
			if !ok {
				streams = nil
				continue
			}
			_ = stream.Close()
		case _, ok := <-errs:
			if !ok {
				errs = nil
			}
		}
	}
}

// blobAt calls the source's GetBlobAt, by which the library fetches parts of zstd:chunked
// layers, for the part from offset on. It is exported, but its chunks have a type that only
// the library can name. A library that has changed it gets no calls.
func blobAt(ctx context.Context, src types.ImageSource, info types.BlobInfo, offset uint64) (chan io.ReadCloser, chan error, error) {
	method := reflect.ValueOf(src).MethodByName("GetBlobAt")
	if !method.IsValid() || method.Type().NumIn() != 3 || method.Type().NumOut() != 3 || method.Type().In(2).Kind() != reflect.Slice {
		return nil, nil, fmt.Errorf("%T: %w", src, errors.ErrUnsupported)
	}
	chunks := reflect.MakeSlice(method.Type().In(2), 1, 1)
	from, length := chunks.Index(0).FieldByName("Offset"), chunks.Index(0).FieldByName("Length")
	if !from.CanUint() || !length.CanUint() {
		return nil, nil, fmt.Errorf("%T: %w", src, errors.ErrUnsupported)
	}
	from.SetUint(offset)
	length.SetUint(math.MaxUint64) // to the end
	results := method.Call([]reflect.Value{reflect.ValueOf(ctx), reflect.ValueOf(info), chunks})
	streams, _ := results[0].Interface().(chan io.ReadCloser)
	errs, _ := results[1].Interface().(chan error)
	err, _ := results[2].Interface().(error)
	if err == nil && (streams == nil || errs == nil) {
		err = errors.ErrUnsupported
	}
	return streams, errs, err
}
