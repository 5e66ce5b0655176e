// Package oci drives OCI runtimes: it creates, runs and deletes the container of a
// bundle, and hides the differences between runtimes behind two small interfaces.
//
// A Runtime is one RuntimeClass handler; a Task is one container of it that has been
// created. Each container has a crius-conmon (package conmon), which is the parent of
// its init, holds its stdio and records its exit. Nothing here keeps state of its own:
// after a restart Load finds the same Task again from the container's id and
// directories, and Delete cleans up after an id whether or not a Task was ever made,
// however far its creation came. What needs no runtime is in the packages below:
// streams (stdio), processes (proc), limits and versions.
package oci

import (
	"context"
	"io"
	"os"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/oci/limits"
	"github.com/crius-run/crius/oci/stdio"
)

// Runtime is a RuntimeClass handler.
type Runtime interface {
	// Create makes the container of ref from spec, up to the point where its
	// init waits to be started. When it fails the caller calls Delete. The error is a
	// *ProgramError if the container's own program is at fault.
	Create(ctx context.Context, ref Ref, spec *specs.Spec, io IO) (Task, error)
	// Load finds the Task of a container that Create made, perhaps under an
	// earlier server. It does not fail because the container is dead.
	Load(ctx context.Context, ref Ref) (Task, error)
	// Unreachable is the Task of a container while its monitor does not answer Load: it
	// can be signalled and killed, and Exited is never closed. All else is
	// fault.Unavailable.
	Unreachable(ref Ref) Task
	// Delete kills what is left of the container and removes every trace of it
	// from the runtime, the monitor and the cgroup tree. It is idempotent.
	Delete(ctx context.Context, ref Ref) error
	// EndLeftovers kills what a container whose first process has ended has left in the
	// sandbox where it lives, of which the runtime alone knows. It does nothing if there is
	// no sandbox, or the runtime knows nothing of the container any more.
	EndLeftovers(ctx context.Context, ref Ref) error
	// Probe returns what the runtime can do, or why it cannot be used now.
	Probe(ctx context.Context) (*Abilities, error)
	// StateFiles returns the runtime's own files about containers, also about those
	// that crius did not create.
	StateFiles() (StateFiles, error)
	// Handler is the configuration behind this runtime.
	Handler() Handler
}

// Task is a container that has been created. All methods may be called at any
// time and concurrently; a container that is gone is not an error where the
// caller wanted it gone.
type Task interface {
	// PID is the container's init as the host sees it, 0 once it is dead.
	PID() int
	// PIDNamespace is that of the init, and stays that one until the file is closed.
	// It is fault.Precondition once the init is dead.
	PIDNamespace() (*os.File, error)
	// Start lets the init run the container's program.
	Start(ctx context.Context) error
	// Started reports whether the container was started, also by an earlier server. It
	// is fault.Timeout while that is not known: a start is in progress, or the runtime
	// does not answer.
	Started(ctx context.Context) (bool, error)
	// Signal sends sig to the init.
	Signal(ctx context.Context, sig unix.Signal) error
	// Kill sends SIGKILL to everything in the container.
	Kill(ctx context.Context) error
	// Exec runs a command in the container, as its own process runs but for the
	// terminal, until it ends. Timeout 0 is no limit; what ran into it has been
	// killed, with its children, and the error is fault.Timeout. The result counts
	// as memory of Execs until ctx ends.
	Exec(ctx context.Context, args []string, timeout time.Duration) (*ExecResult, error)
	// EndAbandoned ends the commands of Execs that an earlier server, which was killed,
	// has left: nobody waits for them, and nobody else would keep their time limit. It
	// comes before any Exec of this server, and takes seconds at most. If a shim did
	// not answer for so long, again tries to end what is left, beside Execs as well;
	// else it is nil.
	EndAbandoned(ctx context.Context) (again func(context.Context) error)
	// Open starts a command in the container like Exec and returns a Session with its
	// streams. ctx bounds the start only. The command continues when the Session is
	// closed, as it does when a terminal is hung up.
	Open(ctx context.Context, c Command) (*stdio.Session, error)
	// Attach connects to the standard streams of the container's own process.
	Attach(ctx context.Context, wanted conmon.Streams) (*stdio.Session, error)
	// Update changes the limits in force, all that are asked for or none. It is
	// fault.Precondition if the container uses more memory than it is to have.
	Update(ctx context.Context, u limits.Update) error
	// Usage is what the container uses according to the runtime, which may hang: the
	// caller bounds ctx. It is fault.Unimplemented for a container whose usage its cgroup
	// has.
	Usage(ctx context.Context) (cgroup.Usage, error)
	// Forward connects to a TCP port inside the sandbox of this container. It is
	// fault.Unimplemented where the port is reached through the pod's network.
	Forward(ctx context.Context, port uint16) (Stream, error)
	// ReopenLog makes the monitor write to a new file at the old path.
	ReopenLog(ctx context.Context) error
	// Logged is how many bytes the container's log has grown since Create or Load made
	// this Task, and how many were discarded.
	Logged(ctx context.Context) conmon.LogCount
	// Exited is closed when the container is dead, or its monitor lost.
	Exited() <-chan struct{}
	// Exit is how the container ended, once Exited is closed; conmon.ErrLost if its
	// monitor died before.
	Exit() (conmon.Exit, error)
	// Close releases what the Task holds and does nothing to the container.
	Close()
}

// Exited tells whether the container's end is known.
func Exited(t Task) bool { return closed(t.Exited()) }

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Ref names a container and the places that belong to it.
type Ref struct {
	ID         string
	Dir        string // run directory: bundle, monitor socket, pid file
	ExitFile   string // durable record of the exit
	CgroupPath string // spec.Linux.CgroupsPath
	Cgroup     string // the same as a path below the cgroup mount
	Sandbox    string // id of the container in whose sandbox it lives; empty: in none, or it is that one
	Last       bool   // for Delete: it is the pod's own, and the others of the pod have been deleted

	UIDs, GIDs []ns.IDMap // of its user namespace; nil: it has none

	// Claim takes room for that many bytes of files of a command until free is called; nil:
	// there is no bound.
	Claim func(bytes int) (free func(), err error)
}

// Rootfs is where the container's root file system is to be mounted.
func (r Ref) Rootfs() string { return r.Dir + "/rootfs" }

// owner returns the user and group of a process in the container as this machine knows them;
// without a process they are root's.
func (r Ref) owner(p *specs.Process) (uid, gid uint32) {
	if p != nil {
		uid, gid = p.User.UID, p.User.GID
	}
	return ns.HostID(r.UIDs, uid), ns.HostID(r.GIDs, gid)
}

func (r Ref) limits() limits.Container {
	return limits.Container{ID: r.ID, Cgroup: r.Cgroup, Sandboxed: r.Sandbox != ""}
}

// IO says where a container's output goes and what its input is.
type IO struct {
	LogFile       string   // CRI log file; empty: discard
	LogDir        string   // the pod's, in which that is; empty: its own
	JournalFields []string // of the container's entries in the journal, if there is one: see JournalFields
	Terminal      bool
	Stdin         bool
	StdinOnce     bool
}

// Command is something to be run in a container.
type Command struct {
	Args     []string
	Terminal bool
	Stdin    bool // else its input is a null device, or a terminal on which nothing is typed

	// noted: its directory stays as long as it runs, for EndAbandoned.
	noted bool
}

// Stream is a connection whose two directions end on their own.
type Stream interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// ExecResult is what Exec collected: the beginning of each stream, MaxExecOutput
// in all, and less while other calls use up the memory that all of them share.
type ExecResult struct {
	Stdout, Stderr []byte
	ExitCode       int32
}

// MaxExecOutput bounds what is kept of both streams of an Exec (CVE-2022-1708): CRI
// has what goes beyond it discarded.
const MaxExecOutput = 16 << 20
