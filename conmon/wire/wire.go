// Package wire is what crius-conmon and its client share: the packets on the
// monitor's socket, the monitor's command line and the documents that it leaves
// behind. The documentation of package conmon describes them.
//
// It is linked into a process that runs once per container, where every package
// in the import graph costs private memory in each process: os, time, bytes and
// x/sys/unix together come to 40 KiB. So this package and conmon/monitor use
// only strconv, syscall and unicode/utf8; a test enforces that.
package wire

import "syscall"

// Names in a container's run directory.
const (
	Socket        = "monitor.sock" // where the monitor listens
	ConsoleSocket = "console.sock" // where the runtime hands over a terminal
	Processes     = "monitor.json" // see AppendProcesses
	Diagnostics   = "monitor.log"  // standard error of the monitor
	StartLock     = "start.lock"   // locked while the container is being started
	HeldFile      = "held"         // exists while a restored container may not run yet

	// The FIFOs of a container whose runtime opens its streams by name.
	StdinFifo  = "stdin.fifo"
	StdoutFifo = "stdout.fifo"
	StderrFifo = "stderr.fifo"
	// OOMFile exists if the runtime has seen that the container ran out of
	// memory. The name is Kata's.
	OOMFile = "oom"
)

// The descriptors that the monitor inherits besides the standard ones.
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

// Fail returns nil if err is nil.
func Fail(step string, err error) error {
	if err == nil {
		return nil
	}
	return &Failure{step, err}
}

// HoldDir is the variable that makes the program hold the container with that run directory when criu runs it.
const HoldDir = "CRIUS_HOLD_DIR"

// One of these as the first argument makes the program do that with each of the
// paths in the other arguments. It answers with one byte for each: the error
// number, or 0.
const (
	StatVerb = "stat"
	LookVerb = "look"     // also reads directories
	MakeVerb = "make-dir" // makes missing directories

	// RelabelVerb is followed by an SELinux context, which it gives to the paths
	// and to everything below them.
	RelabelVerb = "relabel="
)

// SystemPath is RelabelVerb's answer for a path that belongs to the system.
const SystemPath = syscall.EISNAM

// Text is an error that consists only of its message.
type Text string

func (t Text) Error() string { return string(t) }
