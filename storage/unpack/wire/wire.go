// Package wire is the protocol between a server and its pull worker.
//
// The server starts the worker, confined, with a socket, and writes an Order to its standard input.
// The worker writes each Message to the socket as a line of JSON. Each blob that it fetches comes
// over a socket of its own, as packets and a descriptor of the file that the server writes. What it
// has to do with the image store it asks the server, over another socket: each Question and each
// Answer is a line of JSON. See docs/decisions/0019-pull-worker.md and 0083-server-adds-layers.md.
package wire

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/diskusage"
	"github.com/crius-run/crius/storage/unpack/layers"
)

// Name is the name of the program, and its argument 0 when the server starts it.
const Name = "crius-unpack"

// VersionFlag makes the program print Version and end.
const VersionFlag = "--version"

// Version returns a text with the protocol that the program speaks.
func Version() string { return fmt.Sprintf("%s with protocol %d", Name, Protocol) }

// Protocol is the version of the protocol. It changes with the protocol, so that a server detects
// the program of another package.
const Protocol = 4

// Descriptors of a worker, in addition to the standard ones. The program of the server, if it is the worker, has the
// first two.
const (
	SocketFD  = 3 // to the server
	JobFD     = 4 // the job's lock: nobody sweeps files that a worker may still write
	StoreFD   = 5 // to the server, for questions about the store
	StagingFD = 6 // the lock of the staging directory: nobody sweeps it
	ProgramFD = 7 // the program itself, by which it was started if it has no room of its own
)

// Order is what a worker reads from its standard input: the layers of an image that the store lacks.
type Order struct {
	Protocol   int              `json:"Protocol"`
	Layers     []layers.Missing `json:"Layers"` // from the lowest one up
	Staging    layers.Staging   `json:"Staging"`
	Temporary  string           `json:"Temporary"`  // directory for large files
	Parallel   int              `json:"Parallel"`   // layers that are downloaded at a time
	Unpack     int              `json:"Unpack"`     // layers that are unpacked at a time
	RepeatRoom int64            `json:"RepeatRoom"` // bytes
}

// Question is what a worker asks about the store. One of the fields is set.
type Question struct {
	Has  string     `json:"Has,omitempty"`  // id of a layer of the order
	Dirs string     `json:"Dirs,omitempty"` // id of a layer of the order, or of the one below them
	Add  []Unpacked `json:"Add,omitempty"`
}

// Unpacked is a layer of the order that is in the staging directory, or in the store.
type Unpacked struct {
	ID    string          `json:"ID"`
	Name  string          `json:"Name,omitempty"` // of its directory in the staging directory; empty: the store has the layer
	Size  int64           `json:"Size"`           // of its content, in bytes
	UIDs  []uint32        `json:"UIDs,omitempty"`
	GIDs  []uint32        `json:"GIDs,omitempty"`
	Usage diskusage.Usage `json:"Usage"` // of its files
}

// Answer is the server's answer to a Question.
type Answer struct {
	Has    bool           `json:"Has,omitempty"`
	Dirs   []string       `json:"Dirs,omitempty"`
	Added  []layers.Place `json:"Added,omitempty"`  // of the first of the layers, which the store has now
	Failed *Failure       `json:"Failed,omitempty"` // why it has not the next one, or why the question has no answer
}

// MaxQuestion is the maximum size of a question, in bytes: all layers of an image can be added at once.
const MaxQuestion = 1 << 20

// Message is a line that a worker writes to its socket. One of the fields is set.
type Message struct {
	Fetch    *Blob    `json:"Fetch,omitempty"` // a request; the answer is a socket that brings packets
	Added    *Blob    `json:"Added,omitempty"` // was fetched, and its layer is in the store
	Event    *Event   `json:"Event,omitempty"` // of a worker that copies the image
	Log      *Line    `json:"Log,omitempty"`
	Unpacked bool     `json:"Unpacked,omitempty"` // all layers are in the store; the last message
	Copied   string   `json:"Copied,omitempty"`   // id of the image, of a worker that copies it; the last message
	Failed   *Failure `json:"Failed,omitempty"`   // the last message
}

// MaxMessage is the maximum size of a message, in bytes.
const MaxMessage = 64 << 10

// Blob is a blob in a registry.
type Blob struct {
	Digest digest.Digest `json:"Digest"`
	Size   int64         `json:"Size"` // bytes
}

// Event is types.ProgressProperties of containers/image, without what the image says about the
// blob.
type Event struct {
	Blob
	Kind   uint   `json:"Kind"` // types.ProgressEvent
	Update uint64 `json:"Update"`
}

// Line is a line for the log.
type Line struct {
	Level slog.Level `json:"Level"`
	Text  string     `json:"Text"`
	Lost  bool       `json:"Lost,omitempty"` // the text names a layer in the store that cannot be rebuilt
}

// Kinds of packets of a fetch. A packet is a byte for the kind, and its content.
const (
	PacketShown = 's' // 8 bytes: how much of the file may be read; the first one has its descriptor
	PacketWhole = 'w' // the blob is whole, with its digest; the last packet
	PacketError = 'e' // text; the last packet
)

// MaxPacket is the maximum size of a packet, in bytes, more than that of an error.
const MaxPacket = 8 << 10

// SendFile sends a packet with a descriptor by which the file can only be read.
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
	Text     string `json:"Text"`
	Kinds    []int  `json:"Kinds"`              // indexes of carried
	Fetch    int    `json:"Fetch"`              // number of the fetch that failed, from 1; 0: none
	Question int    `json:"Question,omitempty"` // number of the question that failed, from 1; 0: none
}

// carried are the sentinels by which the server and the worker decide.
var carried = []error{
	fault.Invalid, fault.NotFound, fault.Precondition, fault.Unavailable, fault.Timeout, fault.Exhausted, fault.Denied,
	layers.ErrGone, layers.ErrNotRebuilt,
	io.ErrUnexpectedEOF, unix.ENOSPC, unix.EDQUOT, unix.ENOENT, unix.EAGAIN, unix.EACCES,
}

// FetchError is the error of a fetch. The server has the original.
type FetchError struct {
	Number int // of the fetch, from 1
	Text   string
}

func (e *FetchError) Error() string { return e.Text }

// QuestionError is the error of a question. The server has the original.
type QuestionError struct {
	Number int // of the question, from 1
	Err    error
}

func (e *QuestionError) Error() string { return e.Err.Error() }
func (e *QuestionError) Unwrap() error { return e.Err }

// FailureOf returns the part of an error that a message carries.
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
	if question := new(QuestionError); errors.As(err, &question) {
		failure.Question = question.Number
	}
	return failure
}

// Short cuts a text to what a message can carry: a byte may take six in JSON.
func Short(text string) string { return text[:min(len(text), MaxMessage/8)] }

// Arrived returns the error on the other side. original returns the error of the fetch or question that has
// failed, if this side has it, or nil.
func (f *Failure) Arrived(original func(*Failure) error) error {
	if cause := original(f); cause != nil {
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

// arrived is the error of a Failure that has arrived.
type arrived struct {
	text  string
	cause error // decides the kind
}

func (e *arrived) Error() string { return e.text }
func (e *arrived) Unwrap() error { return e.cause }
