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

// counts are the connections of each cgroup and of each owner, and those of root and of
// all others.
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

// compare is positive if connections of a are to be closed before those of b. Where all
// processes are in one cgroup, as with cgroup v1, it comes down to whether root has more
// or all others together: a process with many uids is one of the others.
func (c *counts) compare(a, b Peer) int {
	return cmp.Or(
		cmp.Compare(c.of(a), c.of(b)),
		cmp.Compare(c.groups[a.Group], c.groups[b.Group]),
		cmp.Compare(c.side(a), c.side(b)),
		cmp.Compare(c.owners[a.Owner], c.owners[b.Owner]),
	)
}

// of is how many connections p has: those of its user in any cgroup, or those of its
// cgroup as any user if they are more. Many uids or many cgroups make nobody many peers.
// Root has those of its cgroup alone: the kubelet answers for no other root process.
func (c *counts) of(p Peer) int {
	switch {
	case p.Group == 0:
		return c.owners[p.Owner]
	case p.Owner == root:
		return c.groups[p.Group]
	}
	return max(c.owners[p.Owner], c.groups[p.Group])
}

// side is how many connections root has, or all others, whichever p is of.
func (c *counts) side(p Peer) int {
	if p.Owner == root {
		return c.root
	}
	return c.other
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
