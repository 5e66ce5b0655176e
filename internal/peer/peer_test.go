package peer

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNameOfListener(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := Of(conn), fmt.Sprintf("process %d (%s)", os.Getpid(), strings.TrimSpace(string(comm))); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	if got := Of(ours); got != "an unknown process" {
		t.Errorf("of a pipe: %q", got)
	}
}

func TestNameOfProcessElsewhere(t *testing.T) {
	for _, pid := range []int32{0, -1, 1 << 30} {
		if got := Name(pid); got != "a process in another PID namespace" {
			t.Errorf("%d: %q", pid, got)
		}
	}
}

// wrapped is a connection as splitters and TLS wrap one.
type wrapped struct{ net.Conn }

func (w wrapped) NetConn() net.Conn { return w.Conn }

func TestCaller(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	want := Process{PID: int32(os.Getpid()), UID: uint32(os.Getuid()), Name: strings.TrimSpace(string(comm))}
	if got := Caller(wrapped{wrapped{server}}); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	if got := Caller(ours); got != (Process{}) {
		t.Errorf("of a pipe: %v", got)
	}
}
