// Package crowd bounds connections that anybody may open, so that nobody who opens
// few is kept out by somebody who opens many.
package crowd

import (
	"cmp"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Crowd is a bounded number of connections. When there is one too many, the oldest one
// of the peer that has most of them is closed: the newest one may be the one that matters.
type Crowd struct {
	what   string
	most   int
	closed atomic.Uint64

	mu      sync.Mutex
	members map[*Member]struct{}
	last    uint64
	warned  time.Time
}

// Member is a connection in a crowd.
type Member struct {
	crowd  *Crowd
	peer   Peer
	number uint64 // higher than those that came before
	end    func()
}

// New is for up to most connections, of which the log speaks as what.
func New(what string, most int) *Crowd {
	return &Crowd{what: what, most: most, members: make(map[*Member]struct{})}
}

// Enter adds a connection of peer. If there are too many then, end is called for one
// of them, which may be this one only if its peer has most of them.
func (c *Crowd) Enter(peer Peer, end func()) *Member {
	c.mu.Lock()
	c.last++
	m := &Member{crowd: c, peer: peer, number: c.last, end: end}
	c.members[m] = struct{}{}
	victim := c.victim()
	warn := false
	if victim != nil {
		delete(c.members, victim)
		c.closed.Add(1)
		if warn = time.Since(c.warned) >= warnInterval; warn {
			c.warned = time.Now()
		}
	}
	c.mu.Unlock()
	if victim == nil {
		return m
	}
	if warn {
		slog.Warn("too many connections: closing the oldest of the peer with most of them", "listener", c.what, "limit", c.most, "from", victim.peer)
	}
	victim.end()
	return m
}

// warnInterval is how often the log says that connections are closed.
const warnInterval = time.Minute

// Leave takes the connection out of its crowd, once or more often. A nil Member is in none.
func (m *Member) Leave() {
	if m == nil {
		return
	}
	m.crowd.mu.Lock()
	defer m.crowd.mu.Unlock()
	delete(m.crowd.members, m)
}

// Closed is how many connections were closed because there were too many.
func (c *Crowd) Closed() uint64 { return c.closed.Load() }

// victim is the member to be closed; nil while there are not too many.
func (c *Crowd) victim() *Member {
	if len(c.members) <= c.most {
		return nil
	}
	owners, groups := map[string]int{}, map[Peer]int{}
	for m := range c.members {
		owners[m.peer.Owner]++
		groups[m.peer]++
	}
	var worst *Member
	for m := range c.members {
		if worst == nil || cmp.Or(
			cmp.Compare(owners[m.peer.Owner], owners[worst.peer.Owner]),
			cmp.Compare(groups[m.peer], groups[worst.peer]),
			cmp.Compare(worst.number, m.number),
		) > 0 {
			worst = m
		}
	}
	return worst
}

// Limit is l, whose connections are in the crowd until they are closed.
func (c *Crowd) Limit(l net.Listener) net.Listener { return limited{l, c} }

type limited struct {
	net.Listener
	crowd *Crowd
}

func (l limited) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return limitedConn{conn, l.crowd.Enter(PeerOf(conn), func() { _ = conn.Close() })}, nil
}

type limitedConn struct {
	net.Conn
	member *Member
}

func (c limitedConn) Close() error {
	c.member.Leave()
	return c.Conn.Close()
}
