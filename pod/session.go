package pod

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/oci"
)

// Size is that of a terminal, in characters.
type Size = oci.Size

// Client is whoever talks to a process in a container, as streams. The context
// that comes with it ends when the client has gone; its methods return then.
type Client struct {
	Stdin          io.ReadCloser // nil: nothing will come. Close makes a Read under way return.
	Stdout, Stderr io.Writer     // nil: not wanted
	Resize         <-chan Size   // nil: never
	// Hangup ends the connection to a client that does not read: the reads and
	// writes under way return.
	Hangup func()
}

// ExecResult is what a finished ExecSync gives back. Each stream is cut at
// 16 MiB (CVE-2022-1708).
type ExecResult struct {
	Stdout, Stderr []byte
	ExitCode       int32
}

// lingerTime is how long a client may leave the last output of a container that
// has ended untouched: nobody who does not read can hold anything up (cri-o#6699).
// Who reads slowly gets all there is, which is no more than pipes hold.
const lingerTime = 2 * time.Second

// restTime is how long a container that has read all of a client's input may take
// for its next output before it counts as answered.
const restTime = time.Second

// Exec runs a command in a running container and connects it with a client until
// it ends. A client that leaves takes its end of the streams along, as a terminal
// is hung up; the command may run on.
func (e *Engine) Exec(ctx context.Context, id string, cmd oci.Command, client Client) (exitCode int32, err error) {
	c, err := e.runningContainer(id, "commands run")
	if err != nil {
		return 0, err
	}
	// The operation is over when the command runs: how long it does is its user's
	// business.
	var s *oci.Session
	err = e.deps.Trace.Do(ctx, "exec", c.id, func(ctx context.Context) (err error) {
		s, err = c.now().task.Open(ctx, cmd)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", c.id, err)
	}
	defer s.Close()
	talk := conversation{container: c, session: s, client: client, endInput: s.EndInput, command: true}
	if err := talk.hold(ctx); err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", c.id, err)
	}
	return s.ExitCode()
}

// Attach connects a client with the standard streams of a running container
// until either of them ends, or the client leaves. The end of the client's input
// ends that of a container whose input is to be used once (CRI:
// ContainerConfig.stdin_once), which the client sees to its end. Any other input,
// and a terminal's, stays open and the session ends: kubectl waits for that
// (docs/decisions/0003-sessions.md).
func (e *Engine) Attach(ctx context.Context, id string, client Client) error {
	c, err := e.runningContainer(id, "clients attach")
	if err != nil {
		return err
	}
	s, err := c.now().task.Attach(ctx, conmon.Streams{
		Stdin: client.Stdin != nil, Stdout: client.Stdout != nil, Stderr: client.Stderr != nil,
	})
	if err != nil {
		return fmt.Errorf("container %s: %w", c.id, err)
	}
	defer s.Close()
	talk := conversation{container: c, session: s, client: client, endInput: func() {}}
	if cfg := c.plan.Config.M; cfg.GetStdinOnce() && !cfg.GetTty() {
		talk.endInput = s.EndInput
	} else {
		talk.leaves = s.TakesInput()
	}
	if err := talk.hold(ctx); err != nil {
		return fmt.Errorf("attach to container %s: %w", c.id, err)
	}
	return nil
}

func (e *Engine) runningContainer(id, what string) (*Container, error) {
	c, err := e.containers.find(id)
	if err != nil {
		return nil, err
	}
	if state := c.view.Load().State; state != cri.ContainerState_CONTAINER_RUNNING {
		return nil, fmt.Errorf("container %s is in state %s, %s only in a running one: %w", c.id, state, what, fault.Precondition)
	}
	return c, nil
}

// conversation is a client and a process that have been connected.
type conversation struct {
	container *Container
	session   *oci.Session
	client    Client
	endInput  func() // when the client has said all
	command   bool   // it is over when the process is, and not before
	leaves    bool   // it is over when the client's input is

	taken atomic.Uint64 // how often the client has taken output
}

// listener is the client's end of a stream of output.
type listener struct {
	io.Writer
	taken *atomic.Uint64
}

func (l listener) Write(p []byte) (int, error) {
	n, err := l.Writer.Write(p)
	l.taken.Add(1)
	return n, err
}

// heard is w and counts, unless it is not wanted.
func (v *conversation) heard(w io.Writer) io.Writer {
	if w == nil {
		return nil
	}
	return listener{w, &v.taken}
}

// hold moves bytes until the conversation is over. Then the session is closed.
func (v *conversation) hold(ctx context.Context) error {
	var group panics.Group
	defer group.Wait()
	defer v.session.Close()
	over := make(chan struct{})
	defer close(over)

	inputEnded, settled := make(chan struct{}), make(chan struct{})
	if v.client.Stdin != nil {
		defer v.client.Stdin.Close()
		group.Go(func() {
			v.session.Input(v.client.Stdin)
			v.endInput()
			close(inputEnded)
			if v.leaves {
				v.settle(v.session.Unread, over, settled)
			}
		})
	}
	group.Go(func() { v.follow(ctx, over) })
	unread := make(chan struct{})
	group.Go(func() { v.linger(over, settled, unread) })
	copied := make(chan error, 1)
	group.Go(func() { copied <- v.session.Output(ctx, v.heard(v.client.Stdout), v.heard(v.client.Stderr)) })

	listens := v.client.Stdout != nil || v.client.Stderr != nil
	if listens {
		if err := v.listen(ctx, copied, settled, unread); err != nil || !v.command {
			return err
		}
	}
	var spoken <-chan struct{} // for a client that listens to nothing
	if !v.command {
		spoken = inputEnded
	}
	select {
	case <-v.session.Ended():
	case <-spoken:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// listen waits for the end of the output, which it brings about once the client
// may leave.
func (v *conversation) listen(ctx context.Context, copied <-chan error, settled, unread <-chan struct{}) (err error) {
	select {
	case err = <-copied:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-settled:
		return v.detach(ctx, copied, unread)
	case <-unread:
		v.client.Hangup()
		err = <-copied
	}
	if err == nil {
		err = v.session.Dropped()
	}
	return err
}

// detach ends the session with the last of what the container has written.
func (v *conversation) detach(ctx context.Context, copied <-chan error, unread <-chan struct{}) error {
	limited, cancel := context.WithTimeout(ctx, lingerTime)
	defer cancel()
	dropped := v.session.Detach(limited)
	select {
	case err := <-copied:
		return errors.Join(err, dropped)
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-unread:
		v.client.Hangup()
		return <-copied
	}
}

// settle closes settled when the container has answered the client's input, which
// has ended: it has read all of it and then written nothing for restTime. One that
// reads no more of it for lingerTime, and one that writes all the time, is not
// waited for longer. How much is unread counts the input of other clients as well.
func (v *conversation) settle(unread func() int, over <-chan struct{}, settled chan<- struct{}) {
	tick := time.NewTicker(restTime / 10)
	defer tick.Stop()
	least, taken := unread(), v.taken.Load()
	read := time.Now()
	for moved := read; ; {
		var now time.Time
		select {
		case now = <-tick.C:
		case <-over:
			return
		}
		if n := unread(); n < least {
			least, read, moved = n, now, now
		}
		if n := v.taken.Load(); n != taken {
			taken, moved = n, now
		}
		if now.Sub(read) >= lingerTime || least == 0 && now.Sub(moved) >= restTime {
			close(settled)
			return
		}
	}
}

// follow sets the size of the terminal to that of the client's.
func (v *conversation) follow(ctx context.Context, over <-chan struct{}) {
	for {
		select {
		case size, more := <-v.client.Resize:
			if !more {
				return
			}
			_ = v.session.Resize(ctx, size) // there may be no terminal, or no process any more
		case <-over:
			return
		}
	}
}

// linger closes unread when the container has ended, or the client may leave, and
// the client has taken nothing for some time: it has had its chance.
func (v *conversation) linger(over, settled <-chan struct{}, unread chan<- struct{}) {
	select {
	case <-v.container.exited:
	case <-settled:
	case <-over:
		return
	}
	tick := time.NewTicker(lingerTime)
	defer tick.Stop()
	for taken := v.taken.Load(); ; {
		select {
		case <-tick.C:
		case <-over:
			return
		}
		before := taken
		if taken = v.taken.Load(); taken == before {
			close(unread)
			return
		}
	}
}

// dialTime is far more than a connection inside a pod needs.
const dialTime = 5 * time.Second

// PortForward connects stream with a TCP port of the pod, at 127.0.0.1 or ::1,
// until both sides have ended. Closing stream ends what is sent to the client and
// not what comes from it.
func (e *Engine) PortForward(ctx context.Context, id string, port uint16, stream io.ReadWriteCloser) error {
	s, err := e.sandboxes.find(id)
	if err != nil {
		return err
	}
	if s.view.Load().State != cri.PodSandboxState_SANDBOX_READY {
		return fmt.Errorf("pod %s is not ready: %w", s.id, fault.Precondition)
	}
	conn, err := s.dial(ctx, port)
	if err != nil {
		return fmt.Errorf("pod %s: %w", s.id, err)
	}
	defer conn.Close()
	// What still reads from the client at the end does so until stream is closed
	// for good, which is not for us to do.
	ended := make(chan error, 2)
	go func() {
		_, _ = io.Copy(conn, stream)
		_ = conn.CloseWrite()
		_, _ = io.Copy(io.Discard, stream) // the pod does not want it, others wait behind it
		ended <- nil
	}()
	go func() {
		_, err := io.Copy(stream, conn)
		_ = stream.Close()
		ended <- err
	}()
	for range cap(ended) {
		select {
		case err := <-ended:
			if err != nil {
				return fmt.Errorf("pod %s, port %d: %w", s.id, port, err)
			}
		case <-s.ending.Done():
			return errPodEnding
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// dial connects to a port inside the pod.
func (s *Sandbox) dial(ctx context.Context, port uint16) (oci.Stream, error) {
	if infra := s.now().infra; infra != nil && s.plan.Sandboxed {
		conn, err := infra.Forward(ctx, port)
		if !errors.Is(err, fault.Unimplemented) {
			return conn, err
		}
		return s.dialAddress(ctx, port)
	}
	return s.dialLoopback(ctx, port)
}

// dialAddress connects to the pod's address from the node: a virtual machine's
// loopback is out of reach.
func (s *Sandbox) dialAddress(ctx context.Context, port uint16) (oci.Stream, error) {
	dialer := net.Dialer{Timeout: dialTime}
	err := fmt.Errorf("the pod has no address of its own: %w", fault.Unavailable)
	for _, ip := range s.view.Load().IPs {
		var conn net.Conn
		if conn, err = dialer.DialContext(ctx, "tcp", net.JoinHostPort(ip, strconv.Itoa(int(port)))); err == nil {
			return conn.(*net.TCPConn), nil
		}
	}
	return nil, fmt.Errorf("connect to TCP port %d at the pod's address: %w", port, err)
}

// dialLoopback connects to a port of a pod on the node's kernel.
func (s *Sandbox) dialLoopback(ctx context.Context, port uint16) (conn *net.TCPConn, err error) {
	loopbacks := []unix.Sockaddr{
		&unix.SockaddrInet4{Port: int(port), Addr: [4]byte{127, 0, 0, 1}},
		&unix.SockaddrInet6{Port: int(port), Addr: [16]byte(net.IPv6loopback)},
	}
	var errs []error
	for _, address := range loopbacks {
		if conn, err = s.connect(ctx, address); err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	err = errors.Join(errs...)
	if errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("nobody listens on TCP port %d in the pod, and other protocols than TCP cannot be forwarded: %w", port, fault.Unavailable)
	}
	return nil, fmt.Errorf("connect to TCP port %d: %w", port, err)
}

// connect makes a socket in the pod's network namespace, where it stays, and
// connects it outside: a pod that lets connections wait holds no thread.
func (s *Sandbox) connect(ctx context.Context, address unix.Sockaddr) (*net.TCPConn, error) {
	family := unix.AF_INET
	if _, six := address.(*unix.SockaddrInet6); six {
		family = unix.AF_INET6
	}
	fd := -1
	open := func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	}
	var err error
	if path := s.view.Load().NetNS; path != "" {
		err = ns.Do(path, open)
	} else {
		err = open()
	}
	if err != nil {
		return nil, err
	}
	socket := os.NewFile(uintptr(fd), "socket")
	defer socket.Close()
	if err := unix.Connect(fd, address); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = socket.SetWriteDeadline(time.Unix(1, 0)) })()
	if err := connected(socket); err != nil {
		return nil, errors.Join(err, context.Cause(ctx))
	}
	conn, err := net.FileConn(socket) // a duplicate
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

// connected waits until a socket is connected or cannot be.
func connected(socket *os.File) error {
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	var failure error
	err = raw.Write(func(fd uintptr) bool {
		code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil || code != 0 {
			failure = errors.Join(err, unix.Errno(code))
			return true
		}
		_, err = unix.Getpeername(int(fd))
		return err == nil // else it is still on its way
	})
	return errors.Join(err, failure)
}
