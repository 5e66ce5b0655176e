package conmon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/devnull"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/internal/unixsocket"
)

// Minimum of Spec's LogBurst and LogMost, below which no long line fits, and
// maximum of all limits.
const (
	LeastLogBytes = 64 << 10
	MostLogBytes  = 1<<40 - 1
)

// AttachWait of a Spec: the monitor's default, and no time that matters.
const (
	UsualAttachWait = wire.UsualAttachWait * time.Millisecond
	NoAttachWait    = time.Millisecond
)

// NoRest as RestAfter of a Spec is longer than any container lives.
const NoRest = wire.NoRest * time.Millisecond

// Spec describes a container to be created. Paths are absolute.
type Spec struct {
	ID      string // letters, digits, _ . and -
	Monitor string // the crius-conmon program
	Cgroup  string // cgroup in which the monitor starts, made if missing; empty: the server's own

	// Dir is the container's run directory. It must exist, be writable for the
	// monitor, and have a short path: the path of a socket in it has at most 107
	// bytes.
	Dir      string
	ExitFile string // in an existing directory
	LogFile  string // CRI log; empty: output is discarded
	LogDir   string // of the pod, at or above that of LogFile; in it and below no link is followed; empty: that of LogFile

	// LogRate is the number of bytes per second by which the log may grow,
	// LogBurst the number by which it may exceed that at once; the rest is
	// discarded, which the log notes. LogRate 0: no limit. LogMost is the limit
	// for the bytes of one file, until ReopenLog.
	LogRate, LogBurst, LogMost int64

	// Journal is the socket of journald, which gets what is logged as well,
	// whatever the limits of the log; empty: none. JournalFields are the fields,
	// as NAME=value, of all its entries.
	Journal       string
	JournalFields []string

	// Runtime is the command that creates the container, without what Launch
	// appends: --console-socket if Terminal is set, and the ID. It must make the
	// runtime write PidFile.
	Runtime []string
	Env     []string // of the runtime, in addition to inherit.Environ
	PidFile string

	// Start and Wait are for a container that lives in a runtime sandbox
	// and has no process of its own on this machine; empty for any other. Launch
	// appends the ID to them. Start is run when the Client requests it, with the
	// container's streams, and Wait after that. Wait must end when the container
	// does and then print {"exitStatus":CODE}.
	Start, Wait []string
	// Helpers: the runtime leaves processes behind, children of the monitor, that
	// die with the container. The monitor reaps them before it ends, because some
	// runtimes consider a zombie alive.
	Helpers bool
	// Fifos: the runtime's create takes the container's streams by name, as FIFOs
	// in Dir that the monitor makes (see package wire), and something else starts
	// the container. Wait is run as soon as the container exists; its standard
	// input is a pipe whose end means that the container's input must end. The
	// monitor then knows no terminal, and does not adopt orphans.
	Fifos bool
	// Guest: the pid is a stand-in's, such as a virtual machine. Processes in its
	// cgroup are not the container's, and are not killed with it.
	Guest bool

	// AttachWait is for how long the container waits in its writes for an attached client
	// that reads nothing, in whole milliseconds; the client is then disconnected. 0: the
	// monitor's default, UsualAttachWait; NoAttachWait: it never waits.
	AttachWait time.Duration
	// RestAfter is how long the monitor has nothing to do before it gives its
	// memory back, in whole milliseconds; 0: the monitor's default; NoRest:
	// never.
	RestAfter time.Duration

	// Held: Runtime restores the container from a checkpoint, with this program as action-script of criu and
	// HoldEnv in its environment. The container is created when all of it is there, and runs when the Client
	// requests its start.
	Held bool

	// OwnerUID and OwnerGID are the host's ids of the container's user and group.
	// They own its pipes, because otherwise it could not open /dev/stdout. They
	// are not used with Fifos.
	OwnerUID, OwnerGID uint32

	Terminal  bool
	Stdin     bool // hold a pipe open as standard input; false: a null device
	StdinOnce bool // the first client to attach closes it when it leaves
}

// CreateError is a failed create, with the message of the component that
// failed.
type CreateError struct {
	ExitCode int // of the runtime; 0 if something else failed
	Message  string
}

func (e *CreateError) Error() string { return e.Message }

// Separate time limits for what must be done after a context has ended.
const (
	releaseTimeout = 5 * time.Second  // for a monitor to kill, sync the exit file and exit
	lastTime       = time.Second      // the same for a monitor that may not have run meanwhile
	killTimeout    = 10 * time.Second // for the kernel to end a killed process
)

// HoldEnv returns the environment by which the program that criu runs finds the monitor of a run directory.
func HoldEnv(dir string) []string { return []string{wire.HoldDir + "=" + dir} }

// HeldBack reports whether the container of a run directory was restored and may not run yet.
func HeldBack(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, wire.HeldFile))
	return err == nil
}

// HoldBack says so of a container that is about to be restored.
func HoldBack(dir string) error {
	return os.WriteFile(filepath.Join(dir, wire.HeldFile), nil, 0o600)
}

// Launch starts a monitor, which creates the container, and returns when the
// runtime's create has ended. The error is a *CreateError if that failed. If
// ctx ends first, Launch ends the monitor and everything that it started, which
// may take a few seconds more if the monitor hangs. Only state of a killed
// runtime can remain, which the runtime's delete removes.
func Launch(ctx context.Context, s Spec) (*Client, error) {
	opt, err := s.options()
	if err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("monitor of container %s: %w", s.ID, err)
	}
	c, err := trace.Get(ctx, "start monitor", func(context.Context) (*Client, error) { return s.start(opt) })
	if c == nil {
		return nil, fmt.Errorf("start monitor: %w", err)
	}
	if err == nil {
		err = trace.Do(ctx, "wait for runtime create", c.awaitCreate)
	}
	if err == nil {
		return c, nil
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout+killTimeout)
	defer cancel()
	if left := c.terminate(undo); left != nil {
		err = errors.Join(err, left)
	}
	_ = c.Close()
	for _, name := range []string{wire.Socket, wire.ConsoleSocket} {
		_ = os.Remove(filepath.Join(s.Dir, name))
	}
	return nil, err
}

// awaitCreate returns when the runtime's create has ended.
func (c *Client) awaitCreate(ctx context.Context) error {
	select {
	case <-c.settled:
		return c.outcome()
	case <-ctx.Done():
		return fmt.Errorf("create abandoned: %w", context.Cause(ctx))
	}
}

// An id is used unquoted in file names and documents.
var validID = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$`).MatchString

func (s Spec) options() (*wire.Options, error) {
	if !validID(s.ID) {
		return nil, fmt.Errorf("invalid ID %q: use only letters, digits, '_', '.' and '-': %w", s.ID, fault.Invalid)
	}
	if len(s.Runtime) == 0 {
		return nil, fmt.Errorf("no runtime command: %w", fault.Invalid)
	}
	paths := []string{s.Dir, s.ExitFile, s.PidFile, s.Monitor}
	if s.LogFile != "" {
		paths = append(paths, s.LogFile, cmp.Or(s.LogDir, s.LogFile))
	}
	for _, path := range paths {
		if !filepath.IsAbs(path) || strings.ContainsRune(path, 0) {
			return nil, fmt.Errorf("%q is not an absolute path: %w", path, fault.Invalid)
		}
	}
	if room := len(syscall.RawSockaddrUnix{}.Path) - 1; len(socketPath(s.Dir)) > room {
		return nil, fmt.Errorf("socket path %s is longer than %d bytes: set a shorter run_root: %w", socketPath(s.Dir), room, fault.Invalid)
	}
	program, err := exec.LookPath(s.Runtime[0])
	if err != nil {
		return nil, fmt.Errorf("runtime %w: %w", err, fault.Unavailable)
	}
	runtime := append([]string{program}, s.Runtime[1:]...)
	if s.Terminal {
		runtime = append(runtime, "--console-socket", filepath.Join(s.Dir, wire.ConsoleSocket))
	}
	complete := func(command []string) []string {
		if len(command) > 0 {
			command = append(slices.Clone(command), s.ID)
		}
		return command
	}
	burst := s.LogBurst
	if s.LogRate == 0 { // monitors of earlier versions do not know the option
		burst = 0
	}
	wait := s.AttachWait
	if wait == UsualAttachWait {
		wait = 0
	}
	opt := &wire.Options{
		Start: complete(s.Start), Wait: complete(s.Wait),
		ID: s.ID, Dir: s.Dir, PidFile: s.PidFile, ExitFile: s.ExitFile, LogFile: s.LogFile, LogDir: s.LogDir,
		LogRate: uint64(s.LogRate), LogBurst: uint64(burst), LogMost: uint64(s.LogMost),
		OwnerUID: uint64(s.OwnerUID), OwnerGID: uint64(s.OwnerGID),
		AttachWait: uint64(wait / time.Millisecond), RestAfter: uint64(s.RestAfter / time.Millisecond),
		Terminal: s.Terminal, Stdin: s.Stdin, StdinOnce: s.StdinOnce, Helpers: s.Helpers, Fifos: s.Fifos, Guest: s.Guest, Held: s.Held,
		Runtime: append(runtime, s.ID),
	}
	if s.Journal != "" && s.LogFile != "" { // nor do they know these
		opt.Journal, opt.JournalFields = s.Journal, oneLine(s.JournalFields)
	}
	return opt, nil
}

// oneLine removes from fields the characters that would end them.
func oneLine(fields []string) []string {
	var clean []string
	for _, field := range fields {
		clean = append(clean, strings.Map(func(r rune) rune {
			if unicode.IsControl(r) {
				return '?'
			}
			return r
		}, field))
	}
	return clean
}

// start connects to the monitor's socket first and then starts the monitor.
func (s Spec) start(opt *wire.Options) (c *Client, err error) {
	listener, err := listen(s.Dir)
	if err != nil {
		return nil, err
	}
	defer unix.Close(listener)
	defer func() {
		if err != nil {
			_ = os.Remove(socketPath(s.Dir))
		}
	}()
	conn, err := connect(s.Dir)
	if err != nil {
		return nil, err
	}
	monitor, err := s.exec(listener, opt.Args())
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return newClient(conn, s.Dir, s.ExitFile, monitor)
}

// exec starts the monitor as a child of this process, which the client reaps at
// the end of its stream.
func (s Spec) exec(listener int, args []string) (handle, error) {
	null, err := devnull.Open() // which the monitor passes to the container
	if err != nil {
		return handle{}, err
	}
	defer null.Close()
	diagnostics, err := os.OpenFile(filepath.Join(s.Dir, wire.Diagnostics), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return handle{}, err
	}
	defer diagnostics.Close()
	environ, err := fileOf(overridden(inherit.Environ(), s.Env))
	if err != nil {
		return handle{}, fmt.Errorf("store the runtime's environment for the monitor: %w", err)
	}
	defer environ.Close()
	files := []uintptr{null.Fd(), null.Fd(), diagnostics.Fd(), uintptr(listener), environ.Fd()} // wire.ListenFD, wire.EnvironFD
	own, pidfd := wire.Environ(), -1
	start := func(attr *syscall.SysProcAttr) error {
		attr.Setsid, attr.PidFD = true, &pidfd
		if s.Held { // criu and the runtime mount things, all cgroups of the node among them, and leave them when they are killed
			if err := mount.Isolate(); err != nil {
				return err
			}
			if err := leaveKeyring(); err != nil {
				return err
			}
		}
		argv := append([]string{s.Monitor}, args...)
		_, err := syscall.ForkExec(s.Monitor, argv, &syscall.ProcAttr{Dir: "/", Env: own[:], Files: files, Sys: attr})
		return err
	}
	if s.Cgroup == "" {
		err = inherit.Start(func() error { return start(new(syscall.SysProcAttr)) })
	} else {
		err = cgroup.Start(s.Cgroup, start)
	}
	if err != nil {
		return handle{}, fmt.Errorf("execute %s: %w", s.Monitor, err)
	}
	return newHandle(pidfd)
}

// overridden returns the variables of both lists. Those of more replace others of the same name: of two, programs
// take the first or the last.
func overridden(environ, more []string) []string {
	named := map[string]bool{}
	for _, variable := range more {
		name, _, _ := strings.Cut(variable, "=")
		named[name] = true
	}
	environ = slices.DeleteFunc(slices.Clone(environ), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		return named[name]
	})
	return append(environ, more...)
}

// fileOf returns a memfd that contains words.
func fileOf(words []string) (*os.File, error) {
	fd, err := unix.MemfdCreate("words", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "words")
	var text []byte
	for _, word := range words {
		text = append(append(text, word...), 0)
	}
	if _, err := f.Write(text); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func socketPath(dir string) string { return filepath.Join(dir, wire.Socket) }

func listen(dir string) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	if err = unixsocket.Bind(fd, socketPath(dir)); err == nil {
		err = unix.Listen(fd, 64)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("listen on %s: %w", socketPath(dir), err)
	}
	return fd, nil
}

// connect never blocks: a unix socket answers at once.
func connect(dir string) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open socket: %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: socketPath(dir)}); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("connect to %s: %w", socketPath(dir), err)
	}
	return os.NewFile(uintptr(fd), socketPath(dir)), nil
}

// diagnostics returns the end of the errors that the monitor of dir has
// written.
func diagnostics(dir string) string {
	f, err := os.Open(filepath.Join(dir, wire.Diagnostics))
	if err != nil {
		return ""
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > wire.MaxText {
		_, _ = f.Seek(-wire.MaxText, io.SeekEnd)
	}
	text, _ := io.ReadAll(io.LimitReader(f, wire.MaxText))
	return strings.TrimSpace(strings.ToValidUTF8(string(text), "\uFFFD"))
}

// leaveKeyring gives the calling thread a session keyring of its own, without a name. A runtime that creates a
// container does that itself, and one that restores it does not. A kernel without keyrings, or a filter around the
// server that denies them, has nothing to share.
func leaveKeyring() error {
	_, _, errno := unix.Syscall(unix.SYS_KEYCTL, unix.KEYCTL_JOIN_SESSION_KEYRING, 0, 0)
	if errno == 0 || errno == unix.ENOSYS || errno == unix.EPERM {
		return nil
	}
	return os.NewSyscallError("keyctl", errno)
}
