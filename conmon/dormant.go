package conmon

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/crius-run/crius/conmon/wire"
)

// dormancy is the first part of the life of a client whose monitor rests:
// connecting would wake the monitor, which costs it more than a millisecond. On
// a node with a thousand idle containers that would delay the server's start.
type dormancy struct {
	rest  *Rest
	init  handle // of the container
	once  sync.Once
	ended chan struct{}
}

// openDormant returns a client of a monitor that rests, lives and has nothing to report of its log,
// else nil.
func openDormant(dir, exitFile string) *Client {
	known, err := ReadProcesses(dir)
	if err != nil || known.Rests == nil || known.Rests.Trouble != wire.LogWell {
		return nil
	}
	monitor, err := openHandle(known.Monitor)
	if err != nil {
		return nil
	}
	init, err := openHandle(known.Container)
	if err != nil {
		monitor.close()
		return nil
	}
	count := func(n uint64) count { return count{now: n, inherited: n, known: true} }
	c := &Client{
		logged: count(known.Rests.Logged), discarded: count(known.Rests.Discarded), lost: count(known.Rests.JournalLost),
		dir: dir, exitFile: exitFile, monitor: monitor,
		state: wire.StateRunning, container: known.Container, rests: true,
		dormant: &dormancy{rest: known.Rests, init: init, ended: make(chan struct{})},
		greeted: make(chan struct{}), settled: make(chan struct{}), exited: make(chan struct{}), gone: make(chan struct{}),
	}
	close(c.greeted)
	close(c.settled)
	go c.read()
	time.AfterFunc(lookPeriod, c.look)
	return c
}

// lookPeriod is how often to look whether a monitor still rests.
const lookPeriod = time.Minute

// look connects the client if its monitor no longer rests: it may have troubles of the log
// to report.
func (c *Client) look() {
	select {
	case <-c.dormant.ended:
		return
	default:
	}
	switch {
	case c.isClosed():
	case c.dormant.still(c.dir):
		time.AfterFunc(lookPeriod, c.look)
	default:
		c.dormant.end()
	}
}

// still reports whether the monitor has rested ever since. A client without a
// connection is not notified when the monitor wakes.
func (d *dormancy) still(dir string) bool {
	known, err := ReadProcesses(dir)
	return err == nil && known.Rests != nil && *known.Rests == *d.rest
}

func openHandle(p Process) (handle, error) {
	pidfd, err := openPidfd(p)
	if err != nil {
		return handle{}, err
	}
	return newHandle(pidfd)
}

// awaken ends the dormancy, if there is one.
func (c *Client) awaken(ctx context.Context) error {
	if c.dormant == nil {
		return nil
	}
	select {
	case <-c.dormant.end():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the monitor cannot be reached: %w", context.Cause(ctx))
	}
}

// end makes connect begin, and returns a channel that is closed when it has
// ended.
func (d *dormancy) end() <-chan struct{} {
	d.init.close() // which waits for it
	return d.ended
}

// connected connects a dormant client when that becomes necessary, and reports
// whether there is a connection. The client's goroutine calls it.
func (c *Client) connected() bool {
	if c.dormant != nil {
		c.dormant.once.Do(c.connect)
	}
	return c.conn != nil
}

func (c *Client) connect() {
	defer close(c.dormant.ended)
	go func() { // a killed monitor does not wait for its container's end
		c.monitor.await()
		c.dormant.init.close()
	}()
	c.dormant.init.await()
	c.dormant.init.close()
	const pause = 100 * time.Millisecond
	again := time.NewTicker(pause)
	defer again.Stop()
	for first := true; !c.isClosed(); first = false {
		conn, err := connect(c.dir)
		if err == nil {
			c.raw, err = conn.SyscallConn()
		}
		if err == nil {
			c.conn = conn
			c.introduce()
			return
		}
		if nobodyListens(err) {
			return
		}
		if first { // there may be no descriptors left, or no place in the monitor's queue
			slog.Warn("cannot connect to a monitor yet", "dir", c.dir, "err", err)
		}
		<-again.C
	}
}

func (c *Client) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}
