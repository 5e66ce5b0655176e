// Package wire is what a server and its pull worker say to each other.
//
// The server starts the worker, confined, with a socket, and writes an Order to its standard
// input. The worker answers with a line of JSON for each Message. What it fetches comes by
// another socket each, as packets and a descriptor of the file that the server writes. See
// docs/decisions/0019-pull-worker.md.
package wire

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"
	storagetypes "go.podman.io/storage/types"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/unpack/layers"
)

// Name is that of the program, and its only argument when the server starts it.
const Name = "crius-unpack"

// VersionFlag makes the program print Version and end.
const VersionFlag = "--version"

// Version says which protocol the program speaks.
func Version() string { return fmt.Sprintf("%s with protocol %d", Name, Protocol) }

// Protocol is the version of what server and worker say to each other. It changes with
// that, so that a server which finds the program of another package says so.
const Protocol = 1

// Descriptors of a worker beside its standard ones.
const (
	SocketFD  = 3 // to the server
	JobFD     = 4 // the job's lock: nobody sweeps what a worker may still write
	ProgramFD = 5 // the program itself, by which it was started
)

// Order is what a worker reads from its standard input: the layers of an image, and where
// they go.
type Order struct {
	Protocol   int
	Layers     []layers.Layer // from the lowest one up
	Store      storagetypes.StoreOptions
	Temporary  string // directory for large files
	Parallel   int    // layers that are downloaded at a time
	RepeatRoom int64  // bytes
}

// Message is what a worker writes to its socket, a line each: one of these.
type Message struct {
	Fetch    *Blob    `json:",omitempty"` // a question, to which a socket that brings packets is the answer
	Added    *Blob    `json:",omitempty"` // was fetched, and its layer is in the store
	Event    *Event   `json:",omitempty"` // of a worker that copies the image
	Log      *Line    `json:",omitempty"`
	Unpacked bool     `json:",omitempty"` // all layers are in the store; the last message
	Copied   string   `json:",omitempty"` // id of the image, of a worker that copies it; the last message
	Failed   *Failure `json:",omitempty"` // the last message
}

// MaxMessage is the size of a message at most, in bytes.
const MaxMessage = 64 << 10

// Blob is one of a registry.
type Blob struct {
	Digest digest.Digest
	Size   int64 // bytes
}

// Event is types.ProgressProperties of containers/image without what the image adds to it.
type Event struct {
	Blob
	Kind   uint // types.ProgressEvent
	Update uint64
}

// Line is one for the log.
type Line struct {
	Level slog.Level
	Text  string
	Lost  bool `json:",omitempty"` // the text says which layer in the store cannot be rebuilt
}

// A fetch is packets: a byte for the kind, and what it says.
const (
	PacketShown = 's' // 8 bytes: how much of the file may be read; the first one has its descriptor
	PacketWhole = 'w' // the blob is whole and as it should be; the last packet
	PacketError = 'e' // text; the last packet
)

// MaxPacket is the size of a packet at most, in bytes: more than an error may have.
const MaxPacket = 8 << 10

// SendFile sends a packet with a descriptor by which a file can be read, and nothing else.
func SendFile(to *net.UnixConn, packet []byte, file *os.File) error {
	readable, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", file.Fd()))
	if err != nil {
		return err
	}
	defer readable.Close()
	_, _, err = to.WriteMsgUnix(packet, unix.UnixRights(int(readable.Fd())), nil)
	return err
}

// Failure is an error on its way to the server.
type Failure struct {
	Text  string
	Kinds []int // indexes of carried
	Fetch int   // number of the fetch that has failed, from 1; 0: none has
}

// carried are the errors by which the server decides.
var carried = []error{
	fault.Invalid, fault.NotFound, fault.Precondition, fault.Unavailable, fault.Timeout, fault.Exhausted, fault.Denied,
	cstorage.ErrLayerUnknown, cstorage.ErrImageUnknown, cstorage.ErrParentUnknown,
	cstorage.ErrNotAnImage, cstorage.ErrNotALayer, cstorage.ErrNotAnID,
	io.ErrUnexpectedEOF, unix.ENOSPC, unix.EDQUOT,
}

// FetchError is the error of a fetch, which the server knows better.
type FetchError struct {
	Number int // of the fetch, from 1
	Text   string
}

func (e *FetchError) Error() string { return e.Text }

// FailureOf makes of an error what its message has room for.
func FailureOf(err error) *Failure {
	failure := &Failure{Text: Short(err.Error())}
	for i, kind := range carried {
		if errors.Is(err, kind) {
			failure.Kinds = append(failure.Kinds, i)
		}
	}
	if fetch := new(FetchError); errors.As(err, &fetch) {
		failure.Fetch = fetch.Number
	}
	return failure
}

// Short cuts a text to what a message has room for: a byte may take six in JSON.
func Short(text string) string { return text[:min(len(text), MaxMessage/8)] }

// Arrived is the worker's error; fetch is the error of the n-th fetch, or nil.
func (f *Failure) Arrived(fetch func(n int) error) error {
	if cause := fetch(f.Fetch); cause != nil {
		return &arrived{f.Text, cause}
	}
	var kinds []error
	for _, i := range f.Kinds {
		if i >= 0 && i < len(carried) {
			kinds = append(kinds, carried[i])
		}
	}
	return &arrived{f.Text, errors.Join(kinds...)}
}

// arrived is a Failure that has arrived.
type arrived struct {
	text  string
	cause error // what its kind is found by
}

func (e *arrived) Error() string { return e.text }
func (e *arrived) Unwrap() error { return e.cause }
