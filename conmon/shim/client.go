package shim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
)

// Client is a connection to a shim. Its methods may be called from any goroutine.
// Errors are fault.NotFound for a container or process that the shim does not know,
// fault.Precondition for an operation that its state does not allow,
// fault.Unimplemented for one that the shim does not have, and ErrGone if the shim has
// died.
type Client struct {
	ttrpc   *ttrpc.Client
	service string
}

// ErrGone means that a shim has died, or closed the connection.
var ErrGone = fmt.Errorf("connection to the shim lost: %w", fault.Unavailable)

// Dial connects to a shim. The error is fault.NotFound if it is dead.
func (e Endpoint) Dial(ctx context.Context) (*Client, error) {
	conn, err := e.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("reach shim: %w", err)
	}
	return e.client(conn), nil
}

// Meet is Dial for a shim that has just been started.
func (e Endpoint) Meet(ctx context.Context) (*Client, error) {
	conn, err := e.await(ctx)
	if err != nil {
		return nil, err
	}
	return e.client(conn), nil
}

// client returns a client; versions 2 and 3 have the same messages and differ
// in the service's name.
func (e Endpoint) client(conn net.Conn) *Client {
	return &Client{ttrpc: ttrpc.NewClient(conn), service: fmt.Sprintf("containerd.task.v%d.Task", e.Version)}
}

// Close ends the connection; calls under way return.
func (c *Client) Close() { _ = c.ttrpc.Close() }

func (c *Client) call(ctx context.Context, method string, req, resp proto.Message) error {
	defer trace.For(ctx, "shim")()
	ctx = ttrpc.WithMetadata(ctx, ttrpc.MD{"containerd-namespace-ttrpc": {Namespace}})
	err := c.ttrpc.Call(untold{ctx}, c.service, method, req, resp) //nolint:contextcheck // it ends with ctx
	if err == nil {
		return nil
	}
	return fmt.Errorf("shim %s: %w", method, classify(ctx, err))
}

// untold hides from a shim how long its caller waits: at the deadline of a
// request it would end half-way what it does for it, and with the request what
// must outlive it. Kata's reads the input of a command no longer than that.
type untold struct{ context.Context }

func (untold) Deadline() (time.Time, bool) { return time.Time{}, false }

func classify(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("no answer: %w", context.Cause(ctx))
	}
	if errors.Is(err, ttrpc.ErrClosed) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return fmt.Errorf("%w: %w", err, ErrGone)
	}
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
	text := errors.New(s.Message())
	code := s.Code()
	if code == codes.NotFound && lacks(s.Message()) {
		code = codes.Unimplemented
	}
	switch code {
	case codes.NotFound:
		return fmt.Errorf("%w: %w", text, fault.NotFound)
	case codes.FailedPrecondition:
		return fmt.Errorf("%w: %w", text, fault.Precondition)
	case codes.Unimplemented:
		return fmt.Errorf("%w: %w", text, fault.Unimplemented)
	case codes.AlreadyExists:
		return fmt.Errorf("%w: %w", text, fault.Exists)
	}
	return text
}

// lacks recognizes the answer of a shim in Rust, such as runwasi's, to a method that
// it does not have: /containerd.task.v2.Task/Exec is not supported.
func lacks(message string) bool {
	return strings.HasPrefix(message, "/containerd.task.") && strings.HasSuffix(message, " is not supported")
}

// Stdio are the paths of the FIFOs of a process; an empty one is not used. With
// a terminal there is no Stderr.
type Stdio struct {
	Stdin, Stdout, Stderr string
	Terminal              bool
}

// Create makes the container of a bundle. The meaning of pid depends on the
// shim: the container's init, its runtime sandbox, or the shim itself.
func (c *Client) Create(ctx context.Context, p Program, io Stdio) (pid int, err error) {
	var resp task.CreateTaskResponse
	err = c.call(ctx, "Create", &task.CreateTaskRequest{
		ID: p.ID, Bundle: p.Dir, Terminal: io.Terminal, Stdin: io.Stdin, Stdout: io.Stdout, Stderr: io.Stderr, Options: p.Options,
	}, &resp)
	return int(resp.Pid), err
}

// Process identifies a process to its shim: the command Exec of container ID,
// or the container's own.
type Process struct{ ID, Exec string }

// Exec makes a command, which Start then runs: process is that of the OCI
// runtime specification.
func (c *Client) Exec(ctx context.Context, p Process, process []byte, io Stdio) error {
	return c.call(ctx, "Exec", &task.ExecProcessRequest{
		ID: p.ID, ExecID: p.Exec, Terminal: io.Terminal, Stdin: io.Stdin, Stdout: io.Stdout, Stderr: io.Stderr,
		Spec: &anypb.Any{TypeUrl: specTypes + "Process", Value: process},
	}, new(emptypb.Empty))
}

// specTypes is the prefix under which containerd has the messages of the OCI
// runtime specification, which are JSON.
const specTypes = "types.containerd.io/opencontainers/runtime-spec/1/"

// Start runs the process.
func (c *Client) Start(ctx context.Context, p Process) (pid int, err error) {
	var resp task.StartResponse
	err = c.call(ctx, "Start", &task.StartRequest{ID: p.ID, ExecID: p.Exec}, &resp)
	return int(resp.Pid), err
}

// Wait returns when the process has ended.
func (c *Client) Wait(ctx context.Context, p Process) (exitStatus int, err error) {
	var resp task.WaitResponse
	err = c.call(ctx, "Wait", &task.WaitRequest{ID: p.ID, ExecID: p.Exec}, &resp)
	return int(resp.ExitStatus), err
}

// Kill sends a signal to the process or, with all, to everything in the container.
func (c *Client) Kill(ctx context.Context, p Process, sig unix.Signal, all bool) error {
	return c.call(ctx, "Kill", &task.KillRequest{ID: p.ID, ExecID: p.Exec, Signal: uint32(sig), All: all}, new(emptypb.Empty))
}

// Delete removes an ended process from the shim.
func (c *Client) Delete(ctx context.Context, p Process) error {
	return c.call(ctx, "Delete", &task.DeleteRequest{ID: p.ID, ExecID: p.Exec}, new(task.DeleteResponse))
}

// Shutdown ends the shim if it has no containers any more. It succeeds if the
// shim has already ended.
func (c *Client) Shutdown(ctx context.Context, id string) error {
	err := c.call(ctx, "Shutdown", &task.ShutdownRequest{ID: id}, new(emptypb.Empty))
	if errors.Is(err, ErrGone) {
		return nil
	}
	return err
}

// ResizePty sets the size of the process's terminal, in characters.
func (c *Client) ResizePty(ctx context.Context, p Process, width, height uint16) error {
	return c.call(ctx, "ResizePty", &task.ResizePtyRequest{ID: p.ID, ExecID: p.Exec, Width: uint32(width), Height: uint32(height)}, new(emptypb.Empty))
}

// CloseStdin lets the process read the end of its input.
func (c *Client) CloseStdin(ctx context.Context, p Process) error {
	return c.call(ctx, "CloseIO", &task.CloseIORequest{ID: p.ID, ExecID: p.Exec, Stdin: true}, new(emptypb.Empty))
}

// Update changes the container's limits: resources are LinuxResources of the OCI
// runtime specification.
func (c *Client) Update(ctx context.Context, id string, resources []byte) error {
	return c.call(ctx, "Update", &task.UpdateTaskRequest{
		ID: id, Resources: &anypb.Any{TypeUrl: specTypes + "LinuxResources", Value: resources},
	}, new(emptypb.Empty))
}

// State is the state of a process.
type State struct {
	PID            int // as the shim reports it, which may be any number
	Started, Ended bool
}

// State returns the state of the process. runc's shim still reports the pid of
// a process that has ended and not been deleted: another process may have that
// pid by now.
func (c *Client) State(ctx context.Context, p Process) (State, error) {
	var resp task.StateResponse
	err := c.call(ctx, "State", &task.StateRequest{ID: p.ID, ExecID: p.Exec}, &resp)
	return State{
		PID:     int(resp.Pid),
		Started: resp.Status != tasktypes.Status_CREATED && resp.Status != tasktypes.Status_UNKNOWN,
		Ended:   resp.Status == tasktypes.Status_STOPPED,
	}, err
}

// Started reports whether the process has been started.
func (c *Client) Started(ctx context.Context, p Process) (bool, error) {
	state, err := c.State(ctx, p)
	return state.Started, err
}

// Shim returns the process of the shim, as the shim reports it.
func (c *Client) Shim(ctx context.Context, id string) (wire.Process, error) {
	var resp task.ConnectResponse
	if err := c.call(ctx, "Connect", &task.ConnectRequest{ID: id}, &resp); err != nil {
		return wire.Process{}, err
	}
	if err := CheckPID(int(resp.ShimPid)); err != nil {
		return wire.Process{}, err
	}
	return wire.Find(int(resp.ShimPid))
}

// maxPID is the highest pid for which the kernel can be configured.
const maxPID = 1 << 22

// CheckPID checks that a pid from a shim can be that of a process on this
// machine that may be signalled. For processes in a guest, shims return
// arbitrary numbers.
func CheckPID(pid int) error {
	if pid <= 1 || pid > maxPID {
		return fmt.Errorf("shim returned invalid pid %d: %w", pid, fault.Unavailable)
	}
	return nil
}
