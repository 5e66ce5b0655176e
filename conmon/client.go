package conmon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

// ErrLost means that a monitor has died without recording the exit of its
// container, which may still be alive: ReadProcesses names it.
var ErrLost = fmt.Errorf("monitor lost: %w", fault.Unavailable)

// Client is a connection to the monitor of one container. Its methods may be
// called from any goroutine. It costs a goroutine and two descriptors until the
// monitor ends.
type Client struct {
	conn     *os.File // nil: not connected yet, or no longer
	raw      syscall.RawConn
	dir      string
	exitFile string
	monitor  handle

	mu        sync.Mutex // guards the fields below; never held while waiting
	over      bool       // no more answers will come
	closed    bool
	state     string
	container Process
	exit      Exit
	undead    string // processes of the container that could not be killed
	exitErr   error
	logged    count         // bytes in the log
	discarded count         // bytes that exceeded the log's limit
	met       bool          // the monitor has said hello
	rests     bool          // the monitor rests: nothing is logged until it reports that it wakes
	lost      count         // bytes that did not reach the journal
	trouble   LogTrouble    // of the log
	changed   chan struct{} // closed when trouble changes; nil: nobody waits for that
	failure   error         // why there is no container
	waiting   []chan error  // for answers, in the order of the requests

	dormant *dormancy // nil: the client was made with a connection

	greeted chan struct{} // the monitor's first packet has come, or never will
	settled chan struct{} // created or failed
	exited  chan struct{} // exit and exitErr are final
	gone    chan struct{} // the reader has ended: the monitor is dead, or Close was called
}

func newClient(conn *os.File, dir, exitFile string, monitor handle) (*Client, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &Client{
		conn: conn, raw: raw, dir: dir, exitFile: exitFile, monitor: monitor,
		greeted: make(chan struct{}), settled: make(chan struct{}), exited: make(chan struct{}), gone: make(chan struct{}),
	}
	c.introduce()
	go c.read()
	return c, nil
}

// Dial connects to the monitor of a container that was launched before, perhaps
// by an earlier server. If the monitor has recorded the exit and ended, the
// Client is that of an exited container. If it ended without recording an exit,
// the error is ErrLost.
//
// Dial does not wake a resting monitor: the Client connects when the
// container's init has ended, or when there is a request.
func Dial(ctx context.Context, dir, exitFile string) (*Client, error) {
	if c := openDormant(dir, exitFile); c != nil {
		return c, nil
	}
	c, err := open(dir, exitFile)
	if nobodyListens(err) {
		return deadClient(dir, exitFile)
	}
	if err != nil {
		return nil, err
	}
	if err := c.catchUp(ctx); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

func open(dir, exitFile string) (*Client, error) {
	conn, err := connect(dir)
	if err != nil {
		return nil, err
	}
	return newClient(conn, dir, exitFile, recorded(dir))
}

// recorded returns the monitor that has recorded itself in dir, even if it is
// dead and unreaped; zero if there is none.
func recorded(dir string) handle {
	known, err := ReadProcesses(dir)
	if err != nil {
		return handle{}
	}
	pidfd, err := openPidfd(known.Monitor)
	if err != nil {
		return handle{}
	}
	h, _ := newHandle(pidfd)
	return h
}

func nobodyListens(err error) bool {
	return errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT)
}

func deadClient(dir, exitFile string) (*Client, error) {
	exit, err := ReadExit(exitFile)
	if errors.Is(err, fault.NotFound) {
		return nil, fmt.Errorf("%s: %w", dir, ErrLost)
	}
	if failed := syscall.Errno(0); errors.As(err, &failed) { // the disk may answer again later
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w: the monitor has exited and its exit file cannot be read: %w", dir, ErrLost, err)
	}
	done := make(chan struct{})
	close(done)
	return &Client{dir: dir, exitFile: exitFile, over: true, exit: exit, greeted: done, settled: done, exited: done, gone: done}, nil
}

// catchUp waits until the client knows what had happened before it connected.
func (c *Client) catchUp(ctx context.Context) error {
	await := func(stage <-chan struct{}) error {
		select {
		case <-stage:
			return nil
		case <-ctx.Done():
			return fmt.Errorf("monitor of %s does not answer: %w", c.dir, context.Cause(ctx))
		}
	}
	if err := await(c.greeted); err != nil {
		return err
	}
	c.mu.Lock()
	state := c.state
	c.mu.Unlock()
	switch state {
	case wire.StateCreating:
		return nil
	case wire.StateRunning:
		return await(c.settled)
	}
	if err := await(c.exited); err != nil { // or it has just left silently
		return err
	}
	_, err := c.Exit()
	return err
}

// read is the client's goroutine.
func (c *Client) read() {
	defer close(c.gone)
	for c.connected() {
		packet, err := c.receive()
		if errors.Is(err, unix.ECONNRESET) { // an unread request died with the monitor: its packets come first
			continue
		}
		if err != nil {
			break
		}
		if m, ok := wire.Parse(packet); ok {
			c.handle(m)
		}
	}
	if c.finish() {
		c.monitor.reap()
	}
	if c.conn != nil {
		_ = c.conn.Close()
	}
	c.monitor.close()
}

// receive waits for a packet before it allocates memory for it.
func (c *Client) receive() (packet []byte, err error) {
	waited := c.raw.Read(func(fd uintptr) bool {
		packet, err = next(int(fd))
		return !errors.Is(err, unix.EAGAIN)
	})
	return packet, errors.Join(waited, err)
}

func next(fd int) ([]byte, error) {
	for {
		n, _, err := unix.Recvfrom(fd, nil, unix.MSG_PEEK|unix.MSG_TRUNC|unix.MSG_DONTWAIT)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return nil, err
		case n == 0:
			return nil, io.EOF
		}
		packet := make([]byte, n)
		n, _, err = unix.Recvfrom(fd, packet, unix.MSG_DONTWAIT)
		return packet[:max(n, 0)], err
	}
}

// handle processes one packet. The monitor is trusted; handle guards only
// against repetitions.
func (c *Client) handle(m wire.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch m.Verb {
	case wire.Hello:
		c.state, c.rests, c.met = m.Text, false, true
		if c.dormant == nil { // a dormant client knows what was logged before
			fresh := m.Text == wire.StateCreating
			c.logged.known, c.discarded.known, c.lost.known = fresh, fresh, fresh
		}
		reach(c.greeted)
	case wire.Created:
		c.container = Process{PID: int(m.Num[0]), StartTime: m.Num[1]}
		reach(c.settled)
	case wire.Failed:
		c.failure = &CreateError{ExitCode: int(m.Num[0]), Message: m.Text}
		reach(c.settled)
	case wire.Undead:
		c.undead = m.Text
	case wire.Exited:
		c.exit = Exit{Code: int32(m.Num[0]), Signal: int32(m.Num[1]), FinishedAt: time.Unix(0, int64(m.Num[2])).UTC(), OOMKills: m.Num[3], Message: c.undead}
		reach(c.exited)
	case wire.Logged:
		c.logged.note(m.Num[0])
	case wire.LogDiscarded:
		c.discarded.note(m.Num[0])
	case wire.JournalLost:
		c.lost.note(m.Num[0])
	case wire.LogTrouble:
		c.noteTrouble(m)
	case wire.Rests:
		if c.rests = true; len(c.waiting) > 0 { // their requests came too late
			go func() { _ = c.knock() }()
		}
		c.logged.note(m.Num[0])
		c.discarded.note(m.Num[1])
		c.lost.note(m.Num[2])
	case wire.Wakes:
		c.rests = false
	case wire.OK:
		c.answer(nil)
	case wire.Error:
		c.answer(errors.New(m.Text))
	}
}

func (c *Client) answer(err error) {
	if len(c.waiting) > 0 {
		c.waiting[0] <- err
		c.waiting = c.waiting[1:]
	}
}

func reach(stage chan struct{}) {
	select {
	case <-stage:
	default:
		close(stage)
	}
}

// finish settles what is open when the stream has ended. It returns false if
// the stream was ended from this side.
func (c *Client) finish() bool {
	exit, err := ReadExit(c.exitFile)
	if errors.Is(err, fault.NotFound) {
		err = ErrLost
	}
	died := c.died()

	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = true
	for len(c.waiting) > 0 {
		c.answer(absence())
	}
	if c.closed {
		return false
	}
	select {
	case <-c.exited:
	default:
		c.exit, c.exitErr = exit, err
	}
	if c.container == (Process{}) && c.failure == nil {
		c.failure = died
	}
	for _, stage := range []chan struct{}{c.greeted, c.settled, c.exited} {
		reach(stage)
	}
	return true
}

func (c *Client) died() error {
	if text := diagnostics(c.dir); text != "" {
		return fmt.Errorf("%w: the monitor died before the container was created: %s", ErrLost, text)
	}
	return fmt.Errorf("%w: the monitor died before the container was created, without output", ErrLost)
}

// absence is the error for a request that cannot be served.
func absence() error {
	return fmt.Errorf("the container's monitor has exited: %w", fault.Precondition)
}

func (c *Client) outcome() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failure
}

// PID returns the pid of the container's init in this PID namespace: 0 before
// it exists and after it has exited.
func (c *Client) PID() int { return c.Process().PID }

// Process returns the container's init by PID and start time, which no later
// process has.
func (c *Client) Process() Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.exited:
		if c.exitErr == nil {
			return Process{}
		}
	default:
	}
	return c.container
}

// Exited is closed when the container's exit is known and on disk, or when the
// monitor is lost; never because of Close.
func (c *Client) Exited() <-chan struct{} { return c.exited }

// Exit returns how the container ended. It waits for Exited. The error is
// ErrLost if the monitor died without recording the exit.
func (c *Client) Exit() (Exit, error) {
	<-c.exited
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.exit, c.exitErr
}

// Signal sends a signal to the container's init, even if the monitor is lost.
// It is not an error if the init has exited.
func (c *Client) Signal(sig unix.Signal) error { return Signal(c.Process(), sig) }

// ReopenLog makes the monitor continue the log in a new file at its path. After it
// returns, nothing more is written to the old file; after an error everything still is.
func (c *Client) ReopenLog(ctx context.Context) error {
	return c.ask(ctx, wire.Message{Verb: wire.ReopenLog})
}

// Resize sets the size of the container's terminal, in characters.
func (c *Client) Resize(ctx context.Context, width, height uint16) error {
	return c.ask(ctx, wire.Message{Verb: wire.Resize, Num: [4]uint64{uint64(width), uint64(height)}})
}

// Start has the monitor run Spec.Start, the command that starts the container, and
// returns when that has ended. The command completes even if the client goes away.
func (c *Client) Start(ctx context.Context) error {
	return c.request(ctx, wire.Message{Verb: wire.Start})
}

// CloseStdin lets the container read the end of its standard input.
func (c *Client) CloseStdin(ctx context.Context) error {
	return c.ask(ctx, wire.Message{Verb: wire.CloseStdin})
}

// Release tells the monitor that the container is being deleted: the monitor kills the
// processes that remain, records the exit and ends. Release returns when it has ended.
func (c *Client) Release(ctx context.Context) error {
	err := c.request(ctx, wire.Message{Verb: wire.Release})
	if err != nil && !errors.Is(err, fault.Precondition) {
		return err
	}
	select {
	case <-c.gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("release: the monitor does not exit: %w", context.Cause(ctx))
	}
}

// answerTime is far longer than a monitor takes to answer, unless it hangs or waits for a disk.
const answerTime = 30 * time.Second

// limitAnswer limits the wait for a request that the monitor answers at once. The error that
// comes of it is fault.Timeout and names the monitor.
func limitAnswer(ctx context.Context, dir string) (context.Context, context.CancelFunc) {
	which := ""
	if processes, err := ReadProcesses(dir); err == nil {
		which = fmt.Sprintf(" (process %d)", processes.Monitor.PID)
	}
	return context.WithTimeoutCause(ctx, answerTime, fmt.Errorf("no answer within %s%s: it is stopped, or blocked on a disk: %w", answerTime, which, fault.Timeout))
}

// ask is request with a limit of its own.
func (c *Client) ask(ctx context.Context, m wire.Message) error {
	ctx, cancel := limitAnswer(ctx, c.dir)
	defer cancel()
	return c.request(ctx, m)
}

func (c *Client) request(ctx context.Context, m wire.Message) error {
	if err := c.awaken(ctx); err != nil {
		return fmt.Errorf("%s: %w", m.Verb, err)
	}
	answer := make(chan error, 1)
	c.mu.Lock()
	err := absence()
	if !c.over && c.raw != nil {
		err = c.transmit(wire.Append(nil, m))
	}
	if err == nil {
		c.waiting = append(c.waiting, answer)
	}
	rests := c.rests
	c.mu.Unlock()
	if err == nil && rests {
		err = c.knock()
	}
	if err == nil {
		select {
		case err = <-answer:
		case <-ctx.Done():
			err = fmt.Errorf("the monitor does not answer: %w", context.Cause(ctx))
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", m.Verb, err)
	}
	return nil
}

// transmit does not wait: a monitor that lets requests pile up hangs.
func (c *Client) transmit(packet []byte) error {
	var err error
	failed := c.raw.Control(func(fd uintptr) {
		err = unix.Send(int(fd), packet, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
	switch {
	case failed != nil, err == unix.EPIPE, err == unix.ECONNRESET:
		return absence()
	case err == unix.EAGAIN:
		return fmt.Errorf("the monitor does not read its requests: %w", fault.Unavailable)
	}
	return err
}

// Kill kills the monitor, but not the container, whose exit code is lost.
func (c *Client) Kill() error { return c.monitor.kill() }

// Close ends the connection and leaves the monitor alone. It may be called more
// than once. If the monitor is a child of this process and still there, Terminate
// or a new client will reap it.
func (c *Client) Close() error {
	c.mu.Lock()
	first := !c.closed
	c.closed = true
	c.mu.Unlock()
	if !first || c.conn == nil && c.dormant == nil {
		return nil
	}
	if c.dormant != nil {
		<-c.dormant.end() // which comes soon, because the client is closed
	}
	if c.conn != nil {
		_ = c.conn.Close() // which also ends the reader's wait, in either of its stages
	}
	c.monitor.close()
	<-c.gone
	return nil
}

// Terminate ends the monitor of a run directory and the processes that it has
// started (see Release), whatever it is doing. It kills a monitor that does not
// end. It is not an error if there is none. The exit file need not be known.
func Terminate(ctx context.Context, dir string) error {
	c, err := open(dir, "")
	switch {
	case err == nil:
		defer func() { _ = c.Close() }()
		err = c.terminate(ctx)
	case nobodyListens(err), errors.Is(err, unix.EAGAIN): // or it does not accept
		err = reap(ctx, dir)
	}
	if err != nil {
		return fmt.Errorf("monitor of %s: %w", dir, err)
	}
	return nil
}

// reap ends and reaps an unreachable monitor. Usually it has exited, and at
// most its zombie is left.
func reap(ctx context.Context, dir string) error {
	monitor := recorded(dir)
	if monitor == (handle{}) {
		return nil
	}
	defer context.AfterFunc(ctx, monitor.close)()
	defer monitor.close()
	if err := monitor.kill(); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	monitor.reap()
	return context.Cause(ctx)
}

func (c *Client) terminate(ctx context.Context) error {
	polite, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	released := c.Release(polite)
	if released == nil {
		return nil
	}
	// The time may be over because the machine stood still: give the monitor some
	// time in which it runs, otherwise what it is about to record is lost.
	select {
	case <-c.gone:
		return nil
	case <-time.After(lastTime):
	}
	if err := c.Kill(); err != nil {
		return errors.Join(released, err)
	}
	select {
	case <-c.gone:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-c.gone:
		return nil
	case <-time.After(lastTime):
		return errors.Join(released, fmt.Errorf("still alive after SIGKILL: %w", context.Cause(ctx)))
	}
}
