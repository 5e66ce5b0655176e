package crowd

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// Whoever has fewer connections than others keeps them all, and of one's own the newest
// stay. In each case members are "owner/group", and those listed last are closed, in order.
func TestCrowdClosesTheOldestOfTheLargestPeer(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ enter, closed []string }{
		"room":             {[]string{"a/1", "b/1", "c/1"}, nil},
		"alone":            {[]string{"a/1", "a/2", "a/1", "a/1", "a/1"}, []string{"0", "2"}},
		"one of many":      {[]string{"b/1", "a/1", "a/1", "a/1"}, []string{"1"}},
		"the one is last":  {[]string{"a/1", "a/1", "a/1", "b/1", "b/1"}, []string{"0", "1"}},
		"groups":           {[]string{"a/1", "a/2", "a/2", "a/2", "a/2"}, []string{"1", "2"}},
		"owner over group": {[]string{"b/1", "b/1", "a/1", "a/2", "a/3"}, []string{"0", "2"}},
		"all the same":     {[]string{"a/1", "b/1", "c/1", "d/1", "e/1"}, []string{"0", "1"}},
	} {
		crowd := New("test", 3)
		var closed []string
		for i, who := range c.enter {
			owner, group, _ := strings.Cut(who, "/")
			crowd.Enter(Peer{owner, uint64(group[0])}, func() { closed = append(closed, fmt.Sprint(i)) })
		}
		if !slices.Equal(closed, c.closed) || crowd.Closed() != uint64(len(closed)) {
			t.Errorf("%s: closed %v (%d), want %v", name, closed, crowd.Closed(), c.closed)
		}
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

// connected are both ends of a connection over loopback; the first one is the server's.
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

// The kernel says that a socket which no process has any more is root's.
func TestPeerThatHasClosedIsNobody(t *testing.T) {
	t.Parallel()
	server, client := connected(t, "127.0.0.1:0")
	client.Close()
	if got := PeerOf(server); got != gone {
		t.Errorf("peer is %q", got)
	}
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
