// Package copier is a worker that copies a whole image by containers/image, for layers in a format
// that crius-unpack does not know. crius itself runs as that worker, confined like crius-unpack.
package copier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
	storagetypes "go.podman.io/storage/types"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/storage/liblog"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/unpack/layers"
	"github.com/crius-run/crius/storage/unpack/layerstore"
	"github.com/crius-run/crius/storage/unpack/wire"
	"github.com/crius-run/crius/storage/unpack/worker"
)

// Name is the name under which crius runs Main, by the reexec of containers/storage.
const Name = "crius-pull-worker"

// Order is what to copy: an image that the server has inspected.
type Order struct {
	Store      storagetypes.StoreOptions // destination
	Temporary  string                    // directory for large files
	Parallel   int                       // layers that are downloaded at a time
	RepeatRoom int64                     // see layers.NewUnpacker
	Documents  source.Documents
	Name       string // with registry, and tag or digest
	Signatures [][]byte
}

// Main copies an image as a worker process, which the server has started and confined, and ends the
// process. If the server ends, it ends early.
//
// Logs of the libraries go to the server.
func Main() {
	unix.CloseOnExec(wire.SocketFD)
	unix.CloseOnExec(wire.JobFD)
	worker.Work(func(ctx context.Context, c *worker.Client) (wire.Message, error) {
		liblog.Capture(func(_ context.Context, level slog.Level, text string) {
			c.Send(wire.Message{Log: &wire.Line{Level: level, Text: wire.Short(text)}})
		})
		var order Order
		if err := c.Order(&order); err != nil {
			return wire.Message{}, err
		}
		id, err := copyImage(ctx, c, order)
		if layerstore.Gone(err) {
			err = fmt.Errorf("%w: %w", err, layers.ErrGone)
		}
		return wire.Message{Copied: id}, err
	})
}

func copyImage(ctx context.Context, client *worker.Client, order Order) (id string, err error) {
	named, err := reference.ParseNamed(order.Name)
	if err != nil {
		return "", err
	}
	ref, err := docker.NewReference(named)
	if err != nil {
		return "", err
	}
	plain, err := openStore(order.Store)
	if err != nil {
		return "", err
	}
	staging, err := layerstore.NewStaging(plain, order.Temporary)
	if err != nil {
		return "", err
	}
	defer func() { _ = staging.Delete() }() // if it stays, the next start deletes it
	store := &library{Store: plain, ctx: ctx, into: layers.NewUnpacker(layerstore.Store{Store: plain}, staging.Staging, order.RepeatRoom)}
	sys := &types.SystemContext{BigFilesTemporaryDir: order.Temporary, BlobInfoCacheDir: filepath.Join(os.DevNull, "none")}
	src := &handedReference{ImageReference: ref, source: handedSource{Documents: order.Documents, ref: ref, signatures: order.Signatures, client: client}}
	events := make(chan types.ProgressProperties, 64)
	var reporting sync.WaitGroup
	reporting.Go(func() { report(client, events, order.Documents.ConfigDigest) })
	options := copy.Options{MaxParallelDownloads: uint(max(order.Parallel, 0)), Progress: events}
	id, err = source.Copy(ctx, checked{Store: store}, named, src, sys, options)
	if errors.Is(err, layers.ErrNotRebuilt) {
		client.Lost(err)
		id, err = source.Copy(ctx, checked{Store: store, fetched: true}, named, src, sys, options)
	}
	close(events)
	reporting.Wait()
	return id, err
}

// openStore opens the store of an order. The server has mounted its directory.
func openStore(options storagetypes.StoreOptions) (cstorage.Store, error) {
	options.GraphDriverOptions = append(options.GraphDriverOptions, options.GraphDriverName+".skip_mount_home=true")
	store, err := cstorage.GetStore(options)
	if err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	return store, nil
}

// report forwards events to the server, except those about fetches, which the server knows: there
// would be a message for every read.
func report(client *worker.Client, events <-chan types.ProgressProperties, config digest.Digest) {
	for p := range events {
		event := wire.Event{Blob: wire.Blob{Digest: p.Artifact.Digest, Size: p.Artifact.Size}, Kind: uint(p.Event), Update: p.OffsetUpdate}
		if event.Digest != config {
			if p.Event == types.ProgressEventNewArtifact || p.Event == types.ProgressEventRead {
				continue
			}
			event.Update = 0
		}
		client.Send(wire.Message{Event: &event})
	}
}

// stream is a blob that is read while it arrives.
type stream struct {
	*worker.Fetched
	at, size int64
}

// Read implements io.Reader.
func (s *stream) Read(p []byte) (int, error) {
	for s.at == s.size {
		size, err := s.Next()
		if err != nil {
			return 0, err
		}
		s.size = size
	}
	n, err := s.File().ReadAt(p[:min(int64(len(p)), s.size-s.at)], s.at)
	s.at += int64(n)
	return n, err
}

// Close implements io.Closer.
func (s *stream) Close() error {
	if s.File() == nil {
		return s.Fetched.Close()
	}
	return errors.Join(s.Fetched.Close(), s.File().Close())
}

// handedReference leads to a handedSource.
type handedReference struct {
	types.ImageReference
	source handedSource
}

// NewImageSource implements types.ImageReference.
func (r *handedReference) NewImageSource(context.Context, *types.SystemContext) (types.ImageSource, error) {
	return &r.source, nil
}

// handedSource is an image that the server has inspected and fetches.
type handedSource struct {
	source.Documents
	ref        types.ImageReference
	signatures [][]byte
	client     *worker.Client
}

// Reference implements types.ImageSource.
func (s *handedSource) Reference() types.ImageReference { return s.ref }

// Close implements types.ImageSource.
func (s *handedSource) Close() error { return nil }

// HasThreadSafeGetBlob implements types.ImageSource.
func (s *handedSource) HasThreadSafeGetBlob() bool { return true }

// GetBlob implements types.ImageSource.
func (s *handedSource) GetBlob(_ context.Context, info types.BlobInfo, _ types.BlobInfoCache) (io.ReadCloser, int64, error) {
	if content, size, found := s.ConfigBlob(info.Digest); found {
		return content, size, nil
	}
	blob, err := s.client.Fetch(wire.Blob{Digest: info.Digest, Size: info.Size})
	if err != nil {
		return nil, 0, err
	}
	return &stream{Fetched: blob}, info.Size, nil
}

// GetSignatures implements types.ImageSource.
func (s *handedSource) GetSignatures(context.Context, *digest.Digest) ([][]byte, error) {
	return s.signatures, nil
}

// LayerInfosForCopy implements types.ImageSource.
func (s *handedSource) LayerInfosForCopy(context.Context, *digest.Digest) ([]types.BlobInfo, error) {
	return nil, nil
}
