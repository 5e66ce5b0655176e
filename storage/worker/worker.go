// Package worker copies an image into containers/storage in a process of its own, confined
// and without a network, to which the server passes the layers on. See
// docs/decisions/0019-pull-worker.md.
package worker

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
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

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/layers"
	"github.com/crius-run/crius/storage/liblog"
	"github.com/crius-run/crius/storage/source"
)

// Name is the name under which the program runs Main, by containers/storage's reexec.
const Name = "crius-pull-worker"

// Descriptors of a worker beside its standard ones.
const (
	socketFD = 3 // to the server
	jobFD    = 4 // the job's lock: nobody sweeps what a worker may still write
)

// pullOrder is what a worker reads from its standard input: an image that the
// server has inspected, and where it goes.
type pullOrder struct {
	source.Documents
	Name       string // with registry, and tag or digest
	Signatures [][]byte
	Store      storagetypes.StoreOptions
	Temporary  string // directory for large files
	Parallel   int    // layers
	RepeatRoom int64  // bytes
}

// message is what a worker writes to its socket, a line each: one of these.
type message struct {
	Event  *blobEvent   `json:",omitempty"` // of a blob that is not fetched, or the end of one that is
	Fetch  *blobEvent   `json:",omitempty"` // a question, to which a socket that brings packets is the answer
	Log    *loggedLine  `json:",omitempty"`
	Copied string       `json:",omitempty"` // id of the image; the last message
	Failed *copyFailure `json:",omitempty"` // the last message
}

// blobEvent is types.ProgressProperties without what the image adds to it.
type blobEvent struct {
	Event  types.ProgressEvent
	Digest digest.Digest
	Size   int64
	Update uint64
}

type loggedLine struct {
	Level slog.Level
	Text  string
}

// copyFailure is an error on its way to the server.
type copyFailure struct {
	Text  string
	Kinds []int // indexes of carriedErrors
	Fetch int   // number of the fetch that has failed, from 1; 0: none has
}

// carriedErrors are those by which the server decides.
var carriedErrors = []error{
	fault.Invalid, fault.NotFound, fault.Precondition, fault.Unavailable, fault.Timeout, fault.Exhausted, fault.Denied,
	cstorage.ErrLayerUnknown, cstorage.ErrImageUnknown, cstorage.ErrParentUnknown,
	cstorage.ErrNotAnImage, cstorage.ErrNotALayer, cstorage.ErrNotAnID,
	io.ErrUnexpectedEOF, unix.ENOSPC, unix.EDQUOT,
}

// A fetch is packets: a byte for the kind, and what it says.
const (
	packetShown = 's' // 8 bytes: how much of the file may be read; the first one has its descriptor
	packetWhole = 'w' // the blob is whole and as it should be; the last packet
	packetError = 'e' // text; the last packet
)

const maxPacket = 8 << 10 // bytes, more than an error may have

const maxMessage = 64 << 10 // bytes of a worker's message

// Main copies an image as a worker process, confined by the server that has started
// it, and ends the process. It ends early with the server.
func Main() {
	unix.CloseOnExec(socketFD)
	unix.CloseOnExec(jobFD)
	socket := os.NewFile(socketFD, "server")
	conn, err := net.FileConn(socket)
	if err != nil {
		fmt.Fprintln(os.Stderr, "pull worker:", err)
		os.Exit(1)
	}
	_ = socket.Close()
	w := &worker{conn: conn.(*net.UnixConn), answers: make(chan *os.File), added: map[digest.Digest]bool{}}
	liblog.Capture(func(_ context.Context, level slog.Level, text string) {
		w.send(message{Log: &loggedLine{level, text}})
	})
	ctx, cancel := context.WithCancel(context.Background()) //nolint:forbidigo // the root of the worker process
	go w.listen(cancel)
	if id, err := w.copy(ctx); err != nil {
		w.send(message{Failed: failureOf(err)})
	} else {
		w.send(message{Copied: id})
	}
	os.Exit(0)
}

// worker is the worker's side of the socket.
type worker struct {
	conn    *net.UnixConn
	answers chan *os.File // of the server: sockets

	added   map[digest.Digest]bool // blobs of layers, before the copy
	sending sync.Mutex

	fetching sync.Mutex // one question at a time
	fetches  int
}

// send ends the process if the server is gone.
func (w *worker) send(m message) {
	line, err := json.Marshal(m)
	w.sending.Lock()
	defer w.sending.Unlock()
	if err == nil {
		_, err = w.conn.Write(append(line, '\n'))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "pull worker:", err)
		os.Exit(1)
	}
}

// listen takes the server's answers. The server calls the copy off by sending no
// more.
func (w *worker) listen(cancel context.CancelFunc) {
	defer cancel()
	defer close(w.answers)
	for {
		_, file, err := receive(w.conn, make([]byte, 1))
		if err != nil || file == nil {
			return
		}
		w.answers <- file
	}
}

// receive reads from a socket, and takes the descriptor that came along; nil if none did.
func receive(conn *net.UnixConn, buffer []byte) (n int, file *os.File, err error) {
	rights := make([]byte, unix.CmsgSpace(4))
	n, size, _, _, err := conn.ReadMsgUnix(buffer, rights)
	if err != nil || size == 0 {
		return n, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(rights[:size])
	if err != nil || len(messages) != 1 {
		return n, nil, errors.Join(err, unix.EBADMSG)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return n, nil, errors.Join(err, unix.EBADMSG)
	}
	return n, os.NewFile(uintptr(fds[0]), "from the server"), nil
}

func (w *worker) copy(ctx context.Context) (string, error) {
	var order pullOrder
	if err := json.NewDecoder(bufio.NewReader(os.Stdin)).Decode(&order); err != nil {
		return "", fmt.Errorf("read order: %w", err)
	}
	named, err := reference.ParseNamed(order.Name)
	if err != nil {
		return "", err
	}
	ref, err := docker.NewReference(named)
	if err != nil {
		return "", err
	}
	// The server has mounted it.
	order.Store.GraphDriverOptions = append(order.Store.GraphDriverOptions, order.Store.GraphDriverName+".skip_mount_home=true")
	store, err := cstorage.GetStore(order.Store)
	if err != nil {
		return "", fmt.Errorf("open image store: %w", err)
	}
	store = layers.BoundRepeats(store, order.RepeatRoom)
	sys := &types.SystemContext{BigFilesTemporaryDir: order.Temporary, BlobInfoCacheDir: filepath.Join(os.DevNull, "none")}
	src := &handedReference{ImageReference: ref, source: handedSource{Documents: order.Documents, ref: ref, signatures: order.Signatures, worker: w}}
	if err := w.putLayers(ctx, order, store); err != nil {
		return "", err
	}
	events := make(chan types.ProgressProperties, 64)
	var reporting sync.WaitGroup
	reporting.Go(func() { w.report(events, order.ConfigDigest) })
	id, err := source.Copy(ctx, store, named, src, sys, copy.Options{MaxParallelDownloads: uint(max(order.Parallel, 0)), Progress: events})
	close(events)
	reporting.Wait()
	return id, err
}

// putLayers adds the image's layers to the store, except those of formats that are left
// to copyImage.
func (w *worker) putLayers(ctx context.Context, order pullOrder, store cstorage.Store) error {
	in := layers.Intake{
		Store: store, Dir: order.Temporary, Parallel: max(order.Parallel, 1),
		Fetch: func(l layers.Layer) (layers.Arrival, error) {
			return w.fetch(types.BlobInfo{Digest: l.Blob, Size: l.Size})
		},
		Added: func(l layers.Layer) {
			w.added[l.Blob] = true
			w.send(message{Event: &blobEvent{Event: types.ProgressEventDone, Digest: l.Blob, Size: l.Size}})
		},
	}
	return in.Put(ctx, order.Layers())
}

// report sends events on, except those of blobs whose end has been told and of fetches,
// of which the server knows. For it counts each byte as it comes, which would be a
// message each.
func (w *worker) report(events <-chan types.ProgressProperties, config digest.Digest) {
	for p := range events {
		event := blobEvent{p.Event, p.Artifact.Digest, p.Artifact.Size, p.OffsetUpdate}
		if w.added[event.Digest] {
			continue
		}
		if event.Digest != config {
			if event.Event == types.ProgressEventNewArtifact || event.Event == types.ProgressEventRead {
				continue
			}
			event.Update = 0
		}
		w.send(message{Event: &event})
	}
}

// fetch asks the server for a blob.
func (w *worker) fetch(info types.BlobInfo) (*fetched, error) {
	w.fetching.Lock()
	defer w.fetching.Unlock()
	w.fetches++
	w.send(message{Fetch: &blobEvent{Digest: info.Digest, Size: info.Size}})
	socket, ok := <-w.answers
	if !ok {
		return nil, errServerGone
	}
	defer socket.Close()
	conn, err := net.FileConn(socket)
	if err != nil {
		return nil, err
	}
	return &fetched{conn: conn.(*net.UnixConn), number: w.fetches, packet: make([]byte, maxPacket)}, nil
}

var errServerGone = errors.New("the server cancelled the pull")

// fetched is a blob as the server shows it, in a file that only the server writes.
type fetched struct {
	conn   *net.UnixConn
	number int
	packet []byte   // is received
	file   *os.File // nil until the first Next
}

// fetchError is the error of a fetch, which the server knows better.
type fetchError struct {
	number int
	text   string
}

func (e *fetchError) Error() string { return e.text }

// Next implements layers.Arrival.
func (f *fetched) Next() (size int64, err error) {
	n, file, err := receive(f.conn, f.packet)
	if err != nil || n == 0 {
		return 0, errServerGone
	}
	if file != nil {
		f.file = file
	}
	switch kind, said := f.packet[0], f.packet[1:n]; {
	case kind == packetShown && len(said) == 8 && f.file != nil:
		return int64(binary.BigEndian.Uint64(said)), nil
	case kind == packetWhole:
		return 0, io.EOF
	case kind == packetError:
		return 0, &fetchError{f.number, string(said)}
	}
	return 0, fmt.Errorf("layer from the server: unexpected packet %q", f.packet[:min(n, 16)])
}

// File implements layers.Arrival.
func (f *fetched) File() *os.File { return f.file }

// Close implements layers.Arrival.
func (f *fetched) Close() error { return f.conn.Close() }

// stream is a blob that is read while it arrives.
type stream struct {
	*fetched
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
	n, err := s.file.ReadAt(p[:min(int64(len(p)), s.size-s.at)], s.at)
	s.at += int64(n)
	return n, err
}

// Close implements io.Closer.
func (s *stream) Close() error {
	if s.file == nil {
		return s.fetched.Close()
	}
	return errors.Join(s.fetched.Close(), s.file.Close())
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
	worker     *worker
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
	blob, err := s.worker.fetch(info)
	if err != nil {
		return nil, 0, err
	}
	return &stream{fetched: blob}, info.Size, nil
}

// GetSignatures implements types.ImageSource.
func (s *handedSource) GetSignatures(context.Context, *digest.Digest) ([][]byte, error) {
	return s.signatures, nil
}

// LayerInfosForCopy implements types.ImageSource.
func (s *handedSource) LayerInfosForCopy(context.Context, *digest.Digest) ([]types.BlobInfo, error) {
	return nil, nil
}

// failureOf makes of an error what its message has room for.
func failureOf(err error) *copyFailure {
	failure := &copyFailure{Text: err.Error()}
	if most := maxMessage / 8; len(failure.Text) > most { // a byte may take six in JSON
		failure.Text = failure.Text[:most]
	}
	for i, kind := range carriedErrors {
		if errors.Is(err, kind) {
			failure.Kinds = append(failure.Kinds, i)
		}
	}
	if fetch := new(fetchError); errors.As(err, &fetch) {
		failure.Fetch = fetch.number
	}
	return failure
}

// copyFailed is a copyFailure that has arrived.
type copyFailed struct {
	text  string
	cause error // what its kind is found by
}

func (e *copyFailed) Error() string { return e.text }
func (e *copyFailed) Unwrap() error { return e.cause }

// arrived is the worker's error; fetch is the error of the n-th fetch, or nil.
func (f *copyFailure) arrived(fetch func(n int) error) error {
	if cause := fetch(f.Fetch); cause != nil {
		return &copyFailed{f.Text, cause}
	}
	var kinds []error
	for _, i := range f.Kinds {
		if i >= 0 && i < len(carriedErrors) {
			kinds = append(kinds, carriedErrors[i])
		}
	}
	return &copyFailed{f.Text, errors.Join(kinds...)}
}
