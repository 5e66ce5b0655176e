package server

import (
	"bufio"
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/panics"
)

const (
	// firstWords is how long a new connection may stay silent.
	firstWords = 10 * time.Second
	// maxSilent is how many connections may be silent; further ones wait.
	maxSilent = 64
	// acceptAgain is the pause after a temporary failure of Accept.
	acceptAgain = 100 * time.Millisecond
)

// splitter separates gRPC from HTTP/1 on one listener by the first bytes of
// each connection: HTTP/2 begins with PRI (RFC 9113, section 3.4), which is not
// a method of HTTP/1.
type splitter struct {
	net.Listener
	grpc, http *branch
	silent     chan struct{} // holds one item for each silent connection
	patience   time.Duration // how long they may be silent: firstWords

	mu     sync.Mutex
	conns  map[net.Conn]bool // the silent ones
	closed bool
}

// branch is a listener for the connections of one protocol.
type branch struct {
	*splitter
	conns chan net.Conn
	ended chan struct{} // closed with the splitter
	once  *sync.Once
}

func split(l net.Listener) *splitter {
	s := &splitter{Listener: l, silent: make(chan struct{}, maxSilent), patience: firstWords, conns: map[net.Conn]bool{}}
	ended, once := make(chan struct{}), new(sync.Once)
	s.grpc = &branch{splitter: s, conns: make(chan net.Conn), ended: ended, once: once}
	s.http = &branch{splitter: s, conns: make(chan net.Conn), ended: ended, once: once}
	return s
}

// run accepts until the listener is closed, and then waits for the connections
// whose protocol is still unknown.
func (s *splitter) run(ctx context.Context) error {
	var group sync.WaitGroup
	defer group.Wait()
	for {
		conn, err := s.Listener.Accept()
		if temporary(err) { // for example, no descriptors left
			select {
			case <-time.After(acceptAgain):
			case <-s.grpc.ended:
			}
			continue
		}
		if err != nil {
			_ = s.grpc.Close()
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		select {
		case s.silent <- struct{}{}:
		case <-s.grpc.ended:
			conn.Close()
			continue
		}
		group.Go(func() {
			defer func() { <-s.silent }()
			panics.Run(ctx, "route connection", func() { s.route(conn) })
		})
	}
}

// temporary reports whether Accept may succeed the next time, as gRPC does.
func temporary(err error) bool {
	t, ok := errors.AsType[interface {
		error
		Temporary() bool
	}](err)
	return ok && t.Temporary()
}

func (s *splitter) route(conn net.Conn) {
	if !s.keep(conn) {
		return
	}
	defer s.drop(conn)
	_ = conn.SetReadDeadline(time.Now().Add(s.patience))
	reader := bufio.NewReaderSize(conn, 16)
	first, err := reader.Peek(len("PRI"))
	if err != nil {
		conn.Close()
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	to := s.http
	if string(first) == "PRI" {
		to = s.grpc
	}
	select {
	case to.conns <- &peeked{Conn: conn, reader: reader}:
	case <-to.ended:
		conn.Close()
	}
}

// keep remembers a connection, so that Close can end its silence.
func (s *splitter) keep(conn net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		conn.Close()
		return false
	}
	s.conns[conn] = true
	return true
}

func (s *splitter) drop(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, conn)
}

// Accept returns the next connection of this protocol.
func (b *branch) Accept() (net.Conn, error) {
	select {
	case conn := <-b.conns:
		return conn, nil
	case <-b.ended:
		return nil, net.ErrClosed
	}
}

// Close closes both branches.
func (b *branch) Close() (err error) {
	b.once.Do(func() {
		close(b.ended)
		err = b.Listener.Close()
		b.mu.Lock()
		defer b.mu.Unlock()
		b.closed = true
		for conn := range b.splitter.conns {
			conn.Close()
		}
	})
	return err
}

// peeked is a connection whose first bytes have been read already.
type peeked struct {
	net.Conn
	reader *bufio.Reader
}

func (p *peeked) Read(b []byte) (int, error) { return p.reader.Read(b) }

// NetConn returns the connection to which the bytes came.
func (p *peeked) NetConn() net.Conn { return p.Conn }
