// Package wire is what crius-conmon and its client have in common: the packets
// on the monitor's socket, the monitor's command line and the documents it
// leaves behind. The documentation of package conmon tells the same in words.
//
// It is linked into a process that runs once per container, and there every
// package in the import graph costs each of them private memory: os, time,
// bytes and x/sys/unix together come to 40 KiB. So this package and
// conmon/monitor live on strconv, syscall and unicode/utf8; a test holds them
// to it.
package wire

import "syscall"

// Names in a container's run directory.
const (
	Socket        = "monitor.sock" // where the monitor listens
	ConsoleSocket = "console.sock" // where the runtime hands over a terminal
	Processes     = "monitor.json" // see AppendProcesses
	Diagnostics   = "monitor.log"  // standard error of the monitor
	StartLock     = "start.lock"   // locked while the container is being started

	// The FIFOs of a container whose runtime opens its streams by name.
	StdinFifo  = "stdin.fifo"
	StdoutFifo = "stdout.fifo"
	StderrFifo = "stderr.fifo"
	// OOMFile is there if the runtime has seen that the container ran out of memory.
	// Kata gives it that name.
	OOMFile = "oom"
)

// The descriptors that the monitor inherits, beside the standard ones.
const (
	ListenFD  = 3 // its listening socket
	EnvironFD = 4 // a file with the environment for the runtime, as NUL-terminated words
)

// Failure is an error with the step in which it happened.
type Failure struct {
	Step string
	Err  error
}

func (f *Failure) Error() string { return f.Step + ": " + f.Err.Error() }
func (f *Failure) Unwrap() error { return f.Err }

// Fail is nil if err is.
func Fail(step string, err error) error {
	if err == nil {
		return nil
	}
	return &Failure{step, err}
}

// One of these in the place of the first argument makes the program do that with
// each of the paths that are the other arguments. It answers with a byte for each:
// the error number, or 0.
const (
	StatVerb = "stat"
	LookVerb = "look"     // into directories, too
	MakeVerb = "make-dir" // where there is nothing yet

	// RelabelVerb is followed by an SELinux context, which is given to the paths and to
	// all below them.
	RelabelVerb = "relabel="
)

// SystemPath is the answer of RelabelVerb for a path that is the system's.
const SystemPath = syscall.EISNAM

// Text is an error that is nothing but words.
type Text string

func (t Text) Error() string { return string(t) }
