package crowd

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/crius-run/crius/test/kit/wait"
)

// A peer with fewer connections than others keeps them all, and of a peer's own
// the newest stay. In each case members are "owner/group", and those listed
// last are closed, in order.
func TestCrowdClosesTheOldestOfTheLargestPeer(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ enter, closed []string }{
		"room":             {[]string{"a/1", "b/1", "c/1"}, nil},
		"alone":            {[]string{"a/1", "a/2", "a/1", "a/1", "a/1"}, []string{"0", "2"}},
		"one of many":      {[]string{"b/1", "a/1", "a/1", "a/1"}, []string{"1"}},
		"the one is last":  {[]string{"a/1", "a/1", "a/1", "b/1", "b/1"}, []string{"0", "1"}},
		"groups":           {[]string{"a/1", "a/2", "a/2", "a/2", "a/2"}, []string{"1", "2"}},
		"owner over group": {[]string{"b/1", "b/1", "a/1", "a/2", "a/3"}, []string{"0", "2"}},
		"all the same":     {[]string{"a/1", "b/2", "c/3", "d/4", "e/5"}, []string{"0", "1"}},
	} {
		crowd := New("test", 3)
		var closed []string
		for i, who := range c.enter {
			owner, group, _ := strings.Cut(who, "/")
			number, _ := strconv.ParseUint(group, 10, 64)
			crowd.Enter(Peer{owner, number}, func() { closed = append(closed, fmt.Sprint(i)) })
		}
		if !slices.Equal(closed, c.closed) || crowd.Closed() != uint64(len(closed)) {
			t.Errorf("%s: closed %v (%d), want %v", name, closed, crowd.Closed(), c.closed)
		}
	}
}

// One process can have many uids, if it is root, or many cgroups: it is
// nevertheless one peer. The kubelet keeps the connections that it has beside
// those of others.
func TestCrowdIsNotFooledByPeersOfManyNames(t *testing.T) {
	t.Parallel()
	const kubelet = 20
	for name, flooder := range map[string]func(i int) Peer{
		"user":            func(int) Peer { return Peer{"uid 1", 30} },
		"root":            func(int) Peer { return Peer{root, 30} },
		"users":           func(i int) Peer { return Peer{fmt.Sprint("uid ", i), 30} },
		"user in cgroups": func(i int) Peer { return Peer{"uid 1", uint64(30 + i)} },
		"users beside other root": func(i int) Peer {
			if i < 8 {
				return Peer{root, uint64(30 + i)}
			}
			return Peer{fmt.Sprint("uid ", i), 29}
		},
		"address":          func(int) Peer { return Peer{Owner: "192.0.2.1/32"} },
		"user, cgroup v1":  func(int) Peer { return Peer{"uid 1", kubelet} },
		"users, cgroup v1": func(i int) Peer { return Peer{fmt.Sprint("uid ", 1+i), kubelet} },
	} {
		crowd := New("test", 20)
		for i := range 100 {
			if i == 10 || i == 30 {
				crowd.Enter(Peer{root, kubelet}, func() { t.Errorf("%s: the kubelet's connection was closed", name) })
			}
			crowd.Enter(flooder(i), func() {})
		}
	}
}

// On cgroup v1, root in a container can keep out only root.
func TestCrowdOfRootKeepsOthers(t *testing.T) {
	t.Parallel()
	crowd := New("test", 3)
	for range 10 {
		crowd.Enter(Peer{root, rootGroup}, func() {})
	}
	crowd.Enter(Peer{"uid 1", rootGroup}, func() { t.Error("another user's only connection was closed") })
	for range 10 {
		crowd.Enter(Peer{root, rootGroup}, func() {})
	}
}

func TestCrowdForgetsWhoLeft(t *testing.T) {
	t.Parallel()
	crowd := New("test", 1)
	for range 3 {
		m := crowd.Enter(Peer{Owner: "a"}, func() { t.Error("closed although there was room") })
		m.Leave()
		m.Leave()
	}
}

// connected returns both ends of a connection over loopback.
func connected(t *testing.T, address string) (server, client *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); s.Close() })
	return s.(*net.TCPConn), c.(*net.TCPConn)
}

func TestPeerIsTheUserOfTheSocket(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", "[::]:0"} {
		server, _ := connected(t, address)
		if got, want := PeerOf(server).Owner, fmt.Sprintf("uid %d", os.Geteuid()); got != want {
			t.Errorf("%s: peer is %q, want %q", address, got, want)
		}
	}
}

func TestPeerIsAnotherUser(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	cmd := exec.Command("/bin/bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/"+port+"; read -u 3")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got := PeerOf(c).Owner; got != "uid 65534" {
		t.Errorf("peer is %q", got)
	}
}

// The kernel reports root as the owner of a socket that no process has any
// more.
func TestPeerThatHasClosedIsNobody(t *testing.T) {
	t.Parallel()
	server, client := connected(t, "127.0.0.1:0")
	client.Close()
	// A process that another test has just forked has the socket until it executes its program.
	wait.For(t, "the peer to be nobody", func() bool { return PeerOf(server) == gone })
}

func TestPeersFromElsewhereAreTheirAddresses(t *testing.T) {
	t.Parallel()
	for from, want := range map[string]string{
		"192.0.2.7":              "192.0.2.7/32",
		"::ffff:192.0.2.7":       "192.0.2.7/32",
		"2001:db8:1:2:3:4:5:6":   "2001:db8:1:2::/64",
		"2001:db8:1:2:ffff::9:9": "2001:db8:1:2::/64",
		"fe80::1%lo":             "fe80::/64",
	} {
		remote, err := net.ResolveTCPAddr("tcp", net.JoinHostPort(from, "7"))
		if err != nil {
			t.Fatal(err)
		}
		if got := PeerOf(ends{remote: remote}); got.Owner != want {
			t.Errorf("%s: %q, want %q", from, got, want)
		}
	}
}

type ends struct {
	net.Conn
	remote net.Addr
}

func (e ends) RemoteAddr() net.Addr { return e.remote }
func (e ends) LocalAddr() net.Addr  { return &net.TCPAddr{IP: net.IPv6loopback, Port: 9} }

func FuzzParseAnswer(f *testing.F) {
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = parseAnswer(b) })
}
