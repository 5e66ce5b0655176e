package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/crowd"
)

// hangups learns by epoll that clients have closed their connections, even while
// data is unread. A session does not always read: its process may not want its
// input, or its client may not take the output. One goroutine, and no thread,
// waits for all connections.
type hangups struct {
	epoll *os.File
	raw   syscall.RawConn
	work  sync.WaitGroup
	stall time.Duration // how long a client may take nothing of what is still to be sent to it

	strangers *crowd.Crowd // connections that have not shown a ticket

	mu     sync.Mutex
	closed bool // takes no connection any more
	last   int32
	conns  map[int32]*conn
}

// maxStrangers is how many connections may have shown no ticket yet. Whoever is on
// the node can open them.
const maxStrangers = 1000

func newHangups(most int) (*hangups, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open epoll: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // so that Go polls it
		_ = unix.Close(fd)
		return nil, err
	}
	h := &hangups{epoll: os.NewFile(uintptr(fd), "epoll"), conns: make(map[int32]*conn), strangers: crowd.New("stream server, without a valid session URL", most), stall: stallTime}
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
	visit   *crowd.Member // among the strangers
	gone    chan struct{} // closed when the client has, or Close was called
	closed  chan struct{} // closed when nothing is left of the connection
	leaving sync.Once
	closing sync.Once
	ending  sync.Once
	began   time.Time
	used    atomic.Int64 // when something was read or written last, in nanoseconds since began
}

func (c *conn) Read(p []byte) (int, error) {
	n, err := c.TCPConn.Read(p)
	c.use(n)
	return n, err
}

func (c *conn) Write(p []byte) (int, error) {
	n, err := c.TCPConn.Write(p)
	c.use(n)
	return n, err
}

func (c *conn) use(n int) {
	if n > 0 {
		c.used.Store(int64(time.Since(c.began)))
	}
}

// silence is how long nothing was read or written, whatever has been done to the
// node's clock meanwhile.
func (c *conn) silence() time.Duration { return time.Since(c.began) - time.Duration(c.used.Load()) }

// wait reports that the client has gone, or has been silent for idle (0: ever).
// The end of ctx makes it false.
func (c *conn) wait(ctx context.Context, idle time.Duration) bool {
	var expired <-chan time.Time
	timer := time.NewTimer(idle)
	defer timer.Stop()
	if idle > 0 {
		expired = timer.C
	}
	for {
		select {
		case <-c.gone:
			return true
		case <-ctx.Done():
			return false
		case <-expired:
			left := idle - c.silence()
			if left <= 0 {
				return true
			}
			timer.Reset(left)
		}
	}
}

func (c *conn) leave() { c.leaving.Do(func() { close(c.gone) }) }

const (
	// moment is how long a client may leave its side open when it has everything.
	moment = 2 * time.Second
	// stallTime is hangups.stall. On a busy machine a program may not run for seconds.
	stallTime = 30 * time.Second
	// slowest is how many bytes a second a client must take, over all, of what is still
	// to be sent to it. A modem is as fast.
	slowest = 8 << 10
)

// Close sends what has been written and no more, and gives the client a moment to
// close too: a connection that is closed on data which nobody has read is reset,
// and the client would lose the last words. It does not wait; whenClosed tells.
func (c *conn) Close() error {
	c.leave()
	c.closing.Do(func() {
		_ = c.SetWriteDeadline(time.Unix(1, 0)) // whoever waits in Write is told
		_ = c.CloseWrite()
		closed := make(chan struct{})
		c.hangups.work.Go(func() {
			defer close(closed)
			_, _ = io.Copy(io.Discard, c.TCPConn)
			c.drop()
		})
		c.hangups.work.Go(func() {
			c.linger(closed, c.gone)
			c.drop()
		})
	})
	return nil
}

// linger returns when the client has closed, does not although it has everything, has
// stalled, or is too slow. It has everything when all is said and sent.
func (c *conn) linger(closed, said <-chan struct{}) {
	awaitClient(c.unsent, c.hangups.stall, closed, said)
}

func awaitClient(unsent func() int, stall time.Duration, closed, said <-chan struct{}) {
	tick := time.NewTicker(moment)
	defer tick.Stop()
	left := unsent()
	late := time.NewTimer(stall + time.Duration(left)*time.Second/slowest)
	defer late.Stop()
	var all bool
	for taken := time.Now(); ; {
		select {
		case <-closed:
			return
		case <-late.C:
			return
		case <-said:
			all, said = true, nil
			continue
		case <-tick.C:
		}
		before := left
		switch left = unsent(); {
		case left != before:
			taken = time.Now()
		case all && left == 0 || time.Since(taken) >= stall:
			return
		}
	}
}

// unsent is how many bytes the client's kernel has not taken yet.
func (c *conn) unsent() int {
	var n uint32
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetUint32(int(fd), unix.SIOCOUTQ) })
	}
	return int(n)
}

// introduce makes the connection one that has shown a ticket.
func (c *conn) introduce() { c.visit.Leave() }

// abort closes now. What the client has not taken yet the kernel still sends.
func (c *conn) abort() {
	c.ending.Do(func() {
		c.introduce() // it does not count any more
		c.hangups.mu.Lock()
		if c.hangups.conns[c.number] == c {
			delete(c.hangups.conns, c.number)
		}
		c.hangups.mu.Unlock()
		c.leave()
		_ = c.TCPConn.Close()
		close(c.closed)
	})
}

// drop closes now and for good. The kernel would keep what the client has not taken for
// as long as it takes a little of it now and then, and nobody would count that.
func (c *conn) drop() {
	if c.unsent() > 0 {
		_ = c.SetLinger(0)
	}
	c.abort()
}

// whenClosed has f called once nothing is left of the connection.
func (c *conn) whenClosed(f func()) {
	c.hangups.work.Go(func() {
		<-c.closed
		f()
	})
}

// add begins to watch a connection. With an error it is for the caller to abort.
func (h *hangups) add(plain *net.TCPConn) (*conn, error) {
	c := &conn{TCPConn: plain, hangups: h, gone: make(chan struct{}), closed: make(chan struct{}), began: time.Now()}
	c.use(1)
	c.visit = h.strangers.Enter(crowd.PeerOf(plain), func() { c.drop() })
	raw, err := plain.SyscallConn()
	if err != nil {
		return c, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return c, net.ErrClosed
	}
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

// abortAll ends every connection for good.
func (h *hangups) abortAll() {
	h.mu.Lock()
	h.closed = true
	var open []*conn
	for _, c := range h.conns {
		open = append(open, c)
	}
	h.mu.Unlock()
	for _, c := range open {
		c.abort()
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
	for {
		plain, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c, err := l.hangups.add(plain.(*net.TCPConn))
		if err == nil {
			return c, nil
		}
		c.abort() // this one only
		if !errors.Is(err, net.ErrClosed) {
			slog.Warn("stream connection refused: cannot watch it for a hang-up", "err", err)
		}
	}
}
