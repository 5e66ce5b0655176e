package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"reflect"
	"strings"
	"time"

	"go.podman.io/image/v5/pkg/blobinfocache/none"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/storage/pull/pullerror"
)

// Whole asks the registry for a blob. The bytes pass the guard.
func (s *Image) Whole(ctx context.Context, info types.BlobInfo) (io.ReadCloser, error) {
	if content, _, found := s.ConfigBlob(info.Digest); found {
		return content, nil
	}
	stream, _, err := s.fetch(ctx, info, none.NoCache)
	return stream, err
}

// Part asks the registry for length bytes of a blob from an offset on, or for all of its rest if
// length is 0. The bytes pass the guard. The error is errors.ErrUnsupported if the registry sends
// no parts of blobs, or the library cannot ask for them.
func (s *Image) Part(ctx context.Context, info types.BlobInfo, from, length int64) (io.ReadCloser, error) {
	s.answers.Add(1)
	defer s.answers.Add(-1)
	part, err := s.part(ctx, info, from, length)
	if err != nil && refusesRanges(err) {
		err = fmt.Errorf("%w: %w", errNoRanges, err)
	}
	return part, err
}

// Mirrored reports whether the image has other sources than one registry.
func (s *Image) Mirrored() bool { return s.mirrored }

// fetch asks the registry for a blob.
func (s *Image) fetch(ctx context.Context, info types.BlobInfo, cache types.BlobInfoCache) (io.ReadCloser, int64, error) {
	s.answers.Add(1)
	defer s.answers.Add(-1)
	return s.blob(ctx, info, cache)
}

// errNoRanges says that a blob can only be fetched as a whole.
var errNoRanges = fmt.Errorf("the registry sends no parts of layers: %w", errors.ErrUnsupported)

// refusesRanges reports whether a registry has refused to send the part that it was asked for, or has sent it
// without the Content-Type that the library wants. The library does not export its type for a bad request.
func refusesRanges(err error) bool {
	status := pullerror.StatusOf(err)
	refused := status == http.StatusBadRequest || status == http.StatusRequestedRangeNotSatisfiable || status == http.StatusNotImplemented ||
		err != nil && strings.HasPrefix(err.Error(), "mime: ")
	for ; err != nil && !refused; err = errors.Unwrap(err) {
		refused = reflect.TypeOf(err).Name() == "BadPartialRequestError"
	}
	return refused
}

// rangeTime is how long a registry may take from the header of its answer to the requested part. If
// a registry sends the whole blob, the library skips the bytes before the part, which may take very
// long.
const rangeTime = 5 * time.Second

// blobPart implements Part for a source.
func blobPart(ctx context.Context, src types.ImageSource, info types.BlobInfo, offset, length uint64) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancel(ctx)
	streams, errs, err := blobAt(ctx, src, info, offset, length)
	if err != nil {
		cancel()
		return nil, err
	}
	limit := time.NewTimer(rangeTime)
	defer limit.Stop()
	select {
	case stream, ok := <-streams:
		if part := (&partStream{stream, cancel, streams, errs}); ok && (length == 0 || !isCutOut(stream)) {
			return part, nil
		} else if ok {
			return nil, errors.Join(errNoRanges, part.Close())
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

// isCutOut reports whether the library cuts the part out of a longer answer, such as the whole
// blob. It does not export its type for that.
func isCutOut(stream io.ReadCloser) bool {
	return reflect.TypeOf(stream).Name() == "signalCloseReader"
}

// partStream is the requested part of a blob.
type partStream struct {
	io.ReadCloser
	cancel  context.CancelFunc
	streams <-chan io.ReadCloser
	errs    <-chan error
}

// Close implements io.Closer. It cancels the request first, because the library reads a stream to
// its end when it closes it.
func (s *partStream) Close() error {
	s.cancel()
	err := s.ReadCloser.Close()
	drain(s.streams, s.errs)
	return err
}

// drain waits until the library has ended a cancelled request.
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

// blobAt calls the source's GetBlobAt, by which the library fetches parts of zstd:chunked layers,
// for one part, or for all from offset on if length is 0. The method is exported, but takes a type
// that only the library can name. If the library changes the method, it is not called.
func blobAt(ctx context.Context, src types.ImageSource, info types.BlobInfo, offset, length uint64) (chan io.ReadCloser, chan error, error) {
	method := reflect.ValueOf(src).MethodByName("GetBlobAt")
	if !method.IsValid() || method.Type().NumIn() != 3 || method.Type().NumOut() != 3 || method.Type().In(2).Kind() != reflect.Slice {
		return nil, nil, fmt.Errorf("%T: %w", src, errors.ErrUnsupported)
	}
	chunks := reflect.MakeSlice(method.Type().In(2), 1, 1)
	first, count := chunks.Index(0).FieldByName("Offset"), chunks.Index(0).FieldByName("Length")
	if !first.CanUint() || !count.CanUint() {
		return nil, nil, fmt.Errorf("%T: %w", src, errors.ErrUnsupported)
	}
	if length == 0 {
		length = math.MaxUint64 // which means the end to the library
	}
	first.SetUint(offset)
	count.SetUint(length)
	results := method.Call([]reflect.Value{reflect.ValueOf(ctx), reflect.ValueOf(info), chunks})
	streams, _ := results[0].Interface().(chan io.ReadCloser)
	errs, _ := results[1].Interface().(chan error)
	err, _ := results[2].Interface().(error)
	if err == nil && (streams == nil || errs == nil) {
		err = errors.ErrUnsupported
	}
	return streams, errs, err
}
