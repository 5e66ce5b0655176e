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
