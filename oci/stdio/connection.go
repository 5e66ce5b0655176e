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

// Connection is a connection made by a command in a runtime sandbox: the command's
// standard streams are its two directions.
type Connection struct {
	session *Session
	kill    func() // the command
}

// Connect waits until the command of a session has connected, or closes the
// session. The command reports success by a full stop on standard error, or
// else the reason, and is killed if it does not end with the connection.
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

// connected waits for the first output on standard error: a full stop, or the
// reason for a failure.
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

// Read reads what the peer has sent.
func (c *Connection) Read(p []byte) (int, error) { return c.session.ends.Stdout.Read(p) }

// Write sends to the peer.
func (c *Connection) Write(p []byte) (int, error) { return c.session.ends.Stdin.Write(p) }

// SetWriteDeadline limits how long the peer may take nothing.
func (c *Connection) SetWriteDeadline(t time.Time) error {
	return c.session.ends.Stdin.SetWriteDeadline(t)
}

// CloseWrite ends the sending direction.
func (c *Connection) CloseWrite() error { c.session.EndInput(); return nil }

// Close ends the connection.
func (c *Connection) Close() error { c.session.Close(); return nil }

// Connection returns the connection that a runtime, which has exited, has made
// to the socket.
func (c *Console) Connection() (*WholeStream, error) {
	_ = c.listener.SetDeadline(time.Now().Add(quietTime)) // it is in the queue
	conn, err := c.listener.AcceptUnix()
	if err != nil {
		return nil, fmt.Errorf("the runtime did not connect to the console socket: %w", err)
	}
	return &WholeStream{UnixConn: conn}, nil
}

// WholeStream is a connection through a forwarder that ends both directions
// when one ends, and drops data on the way. CloseWrite therefore delays the end
// of the sending direction until the peer has been silent for a while.
type WholeStream struct {
	*net.UnixConn
	sent atomic.Bool
}

// answerTime is how long an answer may pause once everything has been sent.
const answerTime = 2 * time.Second

// CloseWrite sends nothing. It makes Read return io.EOF after answerTime
// without data.
func (s *WholeStream) CloseWrite() error {
	s.sent.Store(true)
	return s.SetReadDeadline(time.Now().Add(answerTime))
}

// Read is net.Conn's Read limited by answerTime.
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
