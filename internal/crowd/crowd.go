// Package crowd bounds connections that any client may open, so that a client
// that opens many cannot keep out one that opens few.
package crowd

import (
	"cmp"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Crowd is a bounded number of connections. If there is one too many, it closes
// the oldest connection of the peer that has most of them: the newest may be
// the one that matters.
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
	number uint64 // higher than those of earlier members
	end    func()
}

// New returns a crowd of at most that many connections, which the log calls
// what.
func New(what string, most int) *Crowd {
	return &Crowd{what: what, most: most, members: make(map[*Member]struct{})}
}

// Enter adds a connection of peer. If there are too many then, it calls end for
// one of them, which is the new one only if its peer has most of them.
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

// warnInterval is the minimum time between warnings about closed connections.
const warnInterval = time.Minute

// Leave removes the connection from its crowd. It is idempotent and does
// nothing for a nil Member.
func (m *Member) Leave() {
	if m == nil {
		return
	}
	m.crowd.mu.Lock()
	defer m.crowd.mu.Unlock()
	delete(m.crowd.members, m)
}

// Closed returns how many connections were closed because there were too many.
func (c *Crowd) Closed() uint64 { return c.closed.Load() }

// victim returns the member to be closed; nil while there are not too many.
func (c *Crowd) victim() *Member {
	if len(c.members) <= c.most {
		return nil
	}
	counts := counts{groups: map[uint64]int{}, owners: map[string]int{}}
	for m := range c.members {
		counts.add(m.peer)
	}
	var worst *Member
	for m := range c.members {
		if worst == nil || cmp.Or(counts.compare(m.peer, worst.peer), cmp.Compare(worst.number, m.number)) > 0 {
			worst = m
		}
	}
	return worst
}

// counts are the numbers of connections per cgroup, per owner, and of root and
// of all others.
type counts struct {
	groups      map[uint64]int
	owners      map[string]int
	root, other int
}

func (c *counts) add(p Peer) {
	c.groups[p.Group]++
	c.owners[p.Owner]++
	if p.Owner == root {
		c.root++
	} else {
		c.other++
	}
}

// compare is positive if connections of a must be closed before those of b. If
// all processes are in one cgroup, as on cgroup v1, it comes down to whether
// root or all others together have more: a process with many uids is one of the
// others.
func (c *counts) compare(a, b Peer) int {
	return cmp.Or(
		cmp.Compare(c.of(a), c.of(b)),
		cmp.Compare(c.groups[a.Group], c.groups[b.Group]),
		cmp.Compare(c.side(a), c.side(b)),
		cmp.Compare(c.owners[a.Owner], c.owners[b.Owner]),
	)
}

// of returns how many connections count for p: those of its user in any cgroup,
// or those of its cgroup as any user if they are more. Many uids or many
// cgroups do not make many peers. For root only those of its cgroup count: the
// kubelet is not responsible for other root processes.
func (c *counts) of(p Peer) int {
	switch {
	case p.Group == 0:
		return c.owners[p.Owner]
	case p.Owner == root:
		return c.groups[p.Group]
	}
	return max(c.owners[p.Owner], c.groups[p.Group])
}

// side returns how many connections p's side has: root, or all others.
func (c *counts) side(p Peer) int {
	if p.Owner == root {
		return c.root
	}
	return c.other
}

// Limit wraps l; its connections are in the crowd until they are closed.
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
