package stdio

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"
)

// Connection is one made by a command in a sandbox, whose standard streams are its two
// directions.
type Connection struct {
	session *Session
	kill    func() // the command
}

// Connect waits until the command of a session has connected, or closes the session. The
// command says so by a full stop on standard error, or why not, and is killed if it does
// not end with the connection.
func Connect(ctx context.Context, s *Session, kill func()) (*Connection, error) {
	c := &Connection{s, kill}
	go c.end()
	if err := c.connected(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return c, nil
}

// end waits for the forwarding command to exit, which happens when the container closes
// the connection. Once the session is over the command gets DrainTime to pass on what it
// has, and is then killed.
func (c *Connection) end() {
	select {
	case <-c.session.ends.Ended:
		return
	case <-c.session.over:
	}
	select {
	case <-c.session.ends.Ended:
	case <-time.After(DrainTime):
		c.kill()
	}
}

// connected waits for the first word on standard error: a full stop, or why not.
func (c *Connection) connected(ctx context.Context) error {
	stderr := c.session.ends.Stderr
	defer context.AfterFunc(ctx, func() { _ = stderr.SetReadDeadline(time.Now()) })()
	text, err := io.ReadAll(io.LimitReader(stderr, 1))
	if err == nil && string(text) == "." {
		return nil
	}
	_ = stderr.SetReadDeadline(time.Now().Add(DrainTime))
	rest, _ := io.ReadAll(io.LimitReader(stderr, 1000))
	if len(text)+len(rest) == 0 {
		return errors.Join(errors.New("the forwarder has ended without output"), err, context.Cause(ctx))
	}
	return errors.New(string(text) + string(rest))
}

// Read reads what the other side has sent.
func (c *Connection) Read(p []byte) (int, error) { return c.session.ends.Stdout.Read(p) }

// Write sends to the other side.
func (c *Connection) Write(p []byte) (int, error) { return c.session.ends.Stdin.Write(p) }

// CloseWrite ends what is sent.
func (c *Connection) CloseWrite() error { c.session.EndInput(); return nil }

// Close ends the connection.
func (c *Connection) Close() error { c.session.Close(); return nil }

// Connection is the one that a runtime, which has ended, has made to the socket.
func (c *Console) Connection() (*WholeStream, error) {
	_ = c.listener.SetDeadline(time.Now().Add(quietTime)) // it lies in the queue
	conn, err := c.listener.AcceptUnix()
	if err != nil {
		return nil, fmt.Errorf("the runtime did not connect to the console socket: %w", err)
	}
	return &WholeStream{UnixConn: conn}, nil
}

// WholeStream is a connection through somebody who, when one direction ends, ends
// the other as well and drops what is on its way. So the end of what is sent is
// kept back until nothing has come from the other side for a while.
type WholeStream struct {
	*net.UnixConn
	sent atomic.Bool
}

// answerTime is how long an answer may make a pause once all has been sent.
const answerTime = 2 * time.Second

// CloseWrite sends nothing. It makes Read return io.EOF after answerTime without data.
func (s *WholeStream) CloseWrite() error {
	s.sent.Store(true)
	return s.SetReadDeadline(time.Now().Add(answerTime))
}

// Read is that of net.Conn but for answerTime.
func (s *WholeStream) Read(p []byte) (int, error) {
	n, err := s.UnixConn.Read(p)
	if s.sent.Load() {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = io.EOF
		} else {
			_ = s.SetReadDeadline(time.Now().Add(answerTime))
		}
	}
	return n, err
}
