// Package oci drives OCI runtimes: it creates, runs and deletes the container
// of a bundle, and hides the differences between runtimes behind two small
// interfaces.
//
// A Runtime is one RuntimeClass handler; a Task is one of its created
// containers. Each container has a crius-conmon (package conmon), which is the
// parent of its init, holds its stdio and records its exit. The package keeps
// no state of its own: after a restart Load finds the same Task again from the
// container's id and directories, and Delete cleans up after an id whether or
// not a Task was ever made, however far its creation came. Code that needs no
// runtime is in subpackages: streams (stdio), processes (proc), limits and
// versions.
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
	// Create makes the container of ref from spec, up to the point where its init
	// waits to be started. If it fails the caller must call Delete. The error is
	// a *ProgramError if the container's own program is at fault.
	Create(ctx context.Context, ref Ref, spec *specs.Spec, io IO) (Task, error)
	// Restore is Create for a container whose processes come from a checkpoint: none of them runs before
	// Start. It is fault.Precondition if the checkpoint does not fit spec, and fault.Unimplemented if the
	// runtime cannot do it.
	Restore(ctx context.Context, ref Ref, spec *specs.Spec, io IO, from Restored) (Task, error)
	// MayRestore returns why the runtime, criu or the node cannot restore containers.
	MayRestore(ctx context.Context) error
	// Load finds the Task of a container that Create made, perhaps under an
	// earlier server. It does not fail because the container is dead.
	Load(ctx context.Context, ref Ref) (Task, error)
	// Unreachable returns the Task of a container while its monitor does not
	// answer Load: it can be signalled and killed, and Exited is never closed.
	// Everything else is fault.Unavailable.
	Unreachable(ref Ref) Task
	// Delete kills the container's remaining processes and removes every trace of
	// it from the runtime, the monitor and the cgroup tree. It is idempotent.
	Delete(ctx context.Context, ref Ref) error
	// EndLeftovers kills what a container whose first process has ended has left
	// in its runtime sandbox, where only the runtime sees it. It does nothing if there is
	// no runtime sandbox, or the runtime no longer knows the container.
	EndLeftovers(ctx context.Context, ref Ref) error
	// Probe returns what the runtime can do, or why it cannot be used now.
	Probe(ctx context.Context) (*Abilities, error)
	// StateFiles returns the runtime's own files about containers, including
	// those that crius did not create.
	StateFiles() (StateFiles, error)
	// List returns the ids of the containers that the runtime says it has, other
	// programs' as well, if it may keep its state files elsewhere; otherwise nil:
	// StateFiles finds more.
	List(ctx context.Context) ([]string, error)
	// Handler returns the configuration of this runtime.
	Handler() Handler
}

// Task is a created container. All methods may be called at any time and
// concurrently. If the caller's goal is that the container is gone, its absence
// is not an error.
type Task interface {
	// PID returns the pid of the container's init on the host, 0 once it is dead.
	PID() int
	// PIDNamespace returns the PID namespace of the init, pinned until the file
	// is closed. It is fault.Precondition once the init is dead.
	PIDNamespace() (*os.File, error)
	// Start lets the init run the container's program.
	Start(ctx context.Context) error
	// Started reports whether the container was started, by this or an earlier
	// server. It is fault.Timeout while that is not known: a start is in
	// progress, or the runtime does not answer.
	Started(ctx context.Context) (bool, error)
	// Signal sends sig to the init.
	Signal(ctx context.Context, sig unix.Signal) error
	// Kill sends SIGKILL to everything in the container.
	Kill(ctx context.Context) error
	// Exec runs a command in the container until it ends, with the attributes of
	// the container's own process except for the terminal. Timeout 0 means no
	// limit; a command that exceeds it has been killed, with its children, and
	// the error is fault.Timeout. The result counts as memory of Execs until ctx
	// ends.
	Exec(ctx context.Context, args []string, timeout time.Duration) (*ExecResult, error)
	// EndAbandoned ends the commands of Execs and Forwards that an earlier, killed server has
	// left: nothing else waits for them or enforces their time limit. It must be
	// called before any Exec or Forward of this server, and takes seconds at most. If a shim
	// did not answer in that time, again tries to end what is left, also while
	// Execs run; else it is nil.
	EndAbandoned(ctx context.Context) (again func(context.Context) error)
	// Open starts a command in the container like Exec and returns a Session with
	// its streams. ctx bounds the start only. The command continues when the
	// Session is closed, like a process whose terminal hangs up.
	Open(ctx context.Context, c Command) (*stdio.Session, error)
	// Attach connects to the standard streams of the container's own process.
	Attach(ctx context.Context, wanted conmon.Streams) (*stdio.Session, error)
	// Update changes the limits in force: all that u sets, or none. It is
	// fault.Precondition if the container uses more memory than its new limit.
	Update(ctx context.Context, u limits.Update) error
	// Usage returns the container's usage according to the runtime, which may
	// hang: the caller bounds ctx. It is fault.Unimplemented for a container
	// whose cgroup accounts for its usage.
	Usage(ctx context.Context) (cgroup.Usage, error)
	// Forward connects to a TCP port inside the runtime sandbox of this container. It is
	// fault.Unimplemented if the port is reached through the pod's network.
	Forward(ctx context.Context, port uint16) (Stream, error)
	Checkpointer
	// ReopenLog makes the monitor write to a new file at the old path.
	ReopenLog(ctx context.Context) error
	// Logged returns by how many bytes the container's log has grown since Create
	// or Load made this Task, and how many were discarded.
	Logged(ctx context.Context) conmon.LogCount
	// LogTrouble returns why the container's log lacks what the container writes, as
	// far as the monitor has said, and a channel that is closed when there is news.
	LogTrouble() (now conmon.LogTrouble, changed <-chan struct{})
	// Exited is closed when the container is dead or its monitor is lost.
	Exited() <-chan struct{}
	// Exit returns how the container ended, once Exited is closed; conmon.ErrLost
	// if its monitor died before.
	Exit() (conmon.Exit, error)
	// Close releases what the Task holds. It does not affect the container.
	Close()
}

// Exited reports whether the container's end is known.
func Exited(t Task) bool { return closed(t.Exited()) }

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Ref names a container and its files and cgroup.
type Ref struct {
	ID         string
	Dir        string // run directory: bundle, monitor socket, pid file
	ExitFile   string // durable record of the exit
	CgroupPath string // spec.Linux.CgroupsPath
	Cgroup     string // the same as a path below the cgroup mount
	Holder     string // id of the container that holds its runtime sandbox; empty: it is in none, or holds it itself
	Last       bool   // for Delete: it is the pod's own container, and the pod's others have been deleted

	UIDs, GIDs []ns.IDMap // of its user namespace; nil: none

	// Claim reserves that many bytes for a command's files until free is called;
	// nil: no bound.
	Claim func(bytes int) (free func(), err error)
}

// Rootfs returns the mount point of the container's root file system.
func (r Ref) Rootfs() string { return r.Dir + "/rootfs" }

// owner returns the host's ids for the user and group of a process in the
// container; for a nil process, those of root.
func (r Ref) owner(p *specs.Process) (uid, gid uint32) {
	if p != nil {
		uid, gid = p.User.UID, p.User.GID
	}
	return ns.HostID(r.UIDs, uid), ns.HostID(r.GIDs, gid)
}

func (r Ref) limits() limits.Container {
	return limits.Container{ID: r.ID, Cgroup: r.Cgroup, Sandboxed: r.Holder != ""}
}

// IO configures the container's output and input.
type IO struct {
	LogFile       string   // CRI log file; empty: discard
	LogDir        string   // the pod's, which contains LogFile; empty: the file's own directory
	JournalFields []string // of the container's journal entries, if it logs there: see JournalFields
	Terminal      bool
	Stdin         bool
	StdinOnce     bool
}

// Command is a command to run in a container.
type Command struct {
	Args     []string
	Terminal bool
	Stdin    bool // otherwise its input is a null device, or a terminal without input

	// Size of the terminal when the command starts; zero: unknown.
	Size stdio.Size

	// noted: its directory stays while it runs, for EndAbandoned. Otherwise the command outlives this server.
	noted bool
}

// Stream is a connection whose two directions can be closed separately.
type Stream interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// ExecResult is the output that Exec collected: the beginning of each stream,
// MaxExecOutput in total, and less while other calls use up the memory shared
// by all. The end of Stderr says if a process that the command started still had
// the output open.
type ExecResult struct {
	Stdout, Stderr []byte
	ExitCode       int32
}

// MaxExecOutput bounds the kept output of both streams of an Exec, in bytes
// (CVE-2022-1708). CRI says that the rest is discarded.
const MaxExecOutput = 16 << 20
