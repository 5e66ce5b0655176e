package stream

import (
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// hangups watches connections for their other end to close. Reading would tell
// too, but a session does not always read: its process may not want its input, or
// its client may not take the output, and then a client that vanishes would not
// be missed. The kernel tells by epoll even while there is unread data; one
// goroutine, and no thread, waits for all connections.
type hangups struct {
	epoll *os.File
	raw   syscall.RawConn
	work  sync.WaitGroup

	mu    sync.Mutex
	last  int32
	conns map[int32]*conn
}

func newHangups() (*hangups, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open epoll: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // so that Go polls it
		_ = unix.Close(fd)
		return nil, err
	}
	h := &hangups{epoll: os.NewFile(uintptr(fd), "epoll"), conns: make(map[int32]*conn)}
	if h.raw, err = h.epoll.SyscallConn(); err != nil {
		_ = h.epoll.Close()
		return nil, err
	}
	h.work.Go(h.watch)
	return h, nil
}

// conn is a connection that knows when its client has gone.
type conn struct {
	*net.TCPConn
	number  int32
	hangups *hangups
	gone    chan struct{} // closed when the client has, or Close was called
	leaving sync.Once
	closing sync.Once
}

func (c *conn) leave() { c.leaving.Do(func() { close(c.gone) }) }

// Close sends what has been written and no more, and gives the client a moment to
// close too: a connection that is closed on data which nobody has read is reset,
// and the client would lose the last words.
func (c *conn) Close() error {
	const moment = 2 * time.Second
	c.leave()
	c.closing.Do(func() {
		_ = c.SetWriteDeadline(time.Unix(1, 0)) // whoever waits in Write is told
		_ = c.CloseWrite()
		_ = c.SetReadDeadline(time.Now().Add(moment))
		c.hangups.work.Go(func() {
			_, _ = io.Copy(io.Discard, c.TCPConn)
			_ = c.abort()
		})
	})
	return nil
}

// abort closes now.
func (c *conn) abort() error {
	c.hangups.mu.Lock()
	delete(c.hangups.conns, c.number)
	c.hangups.mu.Unlock()
	c.leave()
	return c.TCPConn.Close() // the kernel forgets what is closed
}

// add begins to watch a connection.
func (h *hangups) add(plain *net.TCPConn) (*conn, error) {
	c := &conn{TCPConn: plain, hangups: h, gone: make(chan struct{})}
	raw, err := plain.SyscallConn()
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		h.last = (h.last + 1) & (1<<31 - 1)
		if h.conns[h.last] == nil {
			break
		}
	}
	c.number = h.last
	event := unix.EpollEvent{Events: unix.EPOLLRDHUP | unix.EPOLLONESHOT, Fd: c.number}
	var added error
	err = h.raw.Control(func(epoll uintptr) {
		added = raw.Control(func(fd uintptr) {
			err := unix.EpollCtl(int(epoll), unix.EPOLL_CTL_ADD, int(fd), &event)
			if err == nil {
				h.conns[c.number] = c
			}
		})
	})
	if err == nil {
		err = added
	}
	return c, err
}

func (h *hangups) watch() {
	var events [32]unix.EpollEvent
	for {
		n := 0
		if h.raw.Read(func(epoll uintptr) bool {
			n, _ = unix.EpollWait(int(epoll), events[:], 0)
			return n > 0
		}) != nil {
			return // closed
		}
		h.mu.Lock()
		for _, e := range events[:n] {
			if c := h.conns[e.Fd]; c != nil {
				c.leave()
			}
		}
		h.mu.Unlock()
	}
}

// abortAll ends every connection.
func (h *hangups) abortAll() {
	h.mu.Lock()
	var open []*conn
	for _, c := range h.conns {
		open = append(open, c)
	}
	h.mu.Unlock()
	for _, c := range open {
		_ = c.abort()
	}
}

func (h *hangups) close() {
	_ = h.epoll.Close()
	h.work.Wait()
}

// watched is a listener whose connections are watched.
type watched struct {
	net.Listener
	hangups *hangups
}

func (l watched) Accept() (net.Conn, error) {
	plain, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c, err := l.hangups.add(plain.(*net.TCPConn))
	if err != nil {
		_ = plain.Close()
		return nil, err
	}
	return c, nil
}
