package source

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"time"

	"go.podman.io/image/v5/pkg/blobinfocache/none"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry/download"
)

// A registry may refuse one request and accept the same one a moment later. The library repeats a
// request only after 429, or if a mirror is left.

// retryPause is how long to wait before a request is repeated.
const retryPause = time.Second

// blob asks the registry for a blob, and once more if it has failed in a way that may pass.
func (s *Image) blob(ctx context.Context, info types.BlobInfo, cache types.BlobInfoCache) (io.ReadCloser, int64, error) {
	stream, size, err := s.askForBlob(ctx, info, cache)
	return stream, size, s.requests.ofPart(err)
}

func (s *Image) askForBlob(ctx context.Context, info types.BlobInfo, cache types.BlobInfoCache) (io.ReadCloser, int64, error) {
	used := s.opened()
	stream, size, err := used.GetBlob(ctx, info, cache)
	if err != nil && s.again(ctx, info, used, err) {
		if pullerror.StatusOf(err) == http.StatusPartialContent { // though nobody has asked for a part
			stream, err = blobPart(ctx, s.opened(), info, 0, 0)
			return stream, -1, err
		}
		stream, size, err = s.opened().GetBlob(ctx, info, cache)
	}
	if err == nil && size < 0 {
		stream = &decoded{ReadCloser: stream, asSent: func() (io.ReadCloser, error) { return blobPart(ctx, s.opened(), info, 0, 0) }}
	}
	return stream, size, err
}

// decoded is an answer without a length. net/http drops the length of an answer with Content-Encoding: gzip, and
// decompresses it. Servers of files say so of a layer because its file is gzip, and the archive in it has another
// digest. Parts come as they are sent.
type decoded struct {
	io.ReadCloser

	asSent func() (io.ReadCloser, error) // asks for the whole as a part; nil: it was decided whether to
}

// Read implements io.Reader. It looks at the first bytes of the answer.
func (d *decoded) Read(p []byte) (int, error) {
	if d.asSent == nil {
		return d.ReadCloser.Read(p)
	}
	answer := d.ReadCloser
	head := bufio.NewReaderSize(answer, download.ArchiveHead)
	first, _ := head.Peek(download.ArchiveHead) // an error comes back with the next read
	d.ReadCloser = struct {
		io.Reader
		io.Closer
	}{head, answer}
	if download.IsArchive(first) {
		if sent, err := d.asSent(); err == nil {
			_ = answer.Close()
			d.ReadCloser = sent
		}
	}
	d.asSent = nil
	return d.ReadCloser.Read(p)
}

// part asks the registry for a part of a blob, like blob.
func (s *Image) part(ctx context.Context, info types.BlobInfo, from, length int64) (io.ReadCloser, error) {
	used := s.opened()
	stream, err := blobPart(ctx, used, info, uint64(from), uint64(length))
	if err != nil && s.again(ctx, info, used, err) {
		stream, err = blobPart(ctx, s.opened(), info, uint64(from), uint64(length))
	}
	return stream, s.requests.ofPart(err)
}

// again reports whether a request for a blob, which the manifest names, is worth another one. It
// waits before it returns, and gets new tokens if the registry has refused those of a source: they may
// have expired, whatever the registry has said of their life.
func (s *Image) again(ctx context.Context, info types.BlobInfo, used types.ImageSource, err error) bool {
	status := pullerror.StatusOf(err)
	switch {
	case ctx.Err() != nil:
		return false
	case status == http.StatusPartialContent:
		return true
	case pullerror.LoginRefused(err): // the manifest was not; some say 403 when a token has expired
		return s.renew(ctx, used)
	case s.requests.sentOnForParts() != "" && (status == http.StatusBadRequest || refusesRanges(err)):
		return true // the signature in the address may have expired: the registry gives another one
	case s.mirrored, status != http.StatusNotFound && status < http.StatusInternalServerError:
		return false
	}
	slog.WarnContext(ctx, "registry failed to send a layer or config, asking once more", "digest", info.Digest, "err", pullerror.Cut(pullerror.Redact(err.Error())))
	pause := time.NewTimer(retryPause)
	defer pause.Stop()
	select {
	case <-pause.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// opened returns the source of blobs.
func (s *Image) opened() types.ImageSource {
	s.renewing.Lock()
	defer s.renewing.Unlock()
	if s.renewed != nil {
		return s.renewed
	}
	return s.ImageSource
}

// renew opens another source in the place of one that was used, with tokens of its own. Each pull does
// so a few times at most: wrong credentials stay wrong.
func (s *Image) renew(ctx context.Context, used types.ImageSource) bool {
	const most = 10
	s.renewing.Lock()
	defer s.renewing.Unlock()
	now := s.ImageSource
	if s.renewed != nil {
		now = s.renewed
	}
	switch {
	case used != now: // another layer was faster
		return true
	case s.open == nil || len(s.former) == most:
		return false
	}
	next, err := s.open(ctx)
	if err != nil {
		return false
	}
	slog.InfoContext(ctx, "registry refused a layer or config of an image that it allows, pulling with a new token", "image", s.Name.String())
	if s.renewed != nil {
		s.former = append(s.former, s.renewed) // layers may still come from it
	}
	s.renewed = next
	return true
}

// Close implements types.ImageSource.
func (s *Image) Close() error {
	s.renewing.Lock()
	defer s.renewing.Unlock()
	var errs []error
	for _, one := range append(s.former, s.renewed, s.ImageSource) {
		if one != nil {
			errs = append(errs, one.Close())
		}
	}
	s.former, s.renewed = nil, nil
	return errors.Join(errs...)
}

// config asks the registry for the config of the image.
func (s *Image) config(ctx context.Context, info types.BlobInfo) (io.ReadCloser, error) {
	stream, _, err := s.blob(ctx, info, none.NoCache)
	return stream, err
}
