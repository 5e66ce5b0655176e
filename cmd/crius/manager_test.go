package main

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
)

// listen listens on a socket in a directory of the test.
func listen(t *testing.T, name string) (string, net.Listener) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), name)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return socket, l
}

// listens returns a service manager and the socket that receives its notifications.
func listens(t *testing.T) (manager, *net.UnixConn) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return manager{socket: socket, watchdog: 300 * time.Millisecond}, c
}

// empty answers every list.
type empty struct {
	cri.UnimplementedRuntimeServiceServer
}

func (empty) ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	return &cri.ListPodSandboxResponse{}, nil
}

func (empty) ListContainers(context.Context, *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	return &cri.ListContainersResponse{}, nil
}

func TestAnsweringServerNotifiesTheWatchdog(t *testing.T) {
	t.Parallel()
	socket, l := listen(t, "s")
	server := grpc.NewServer()
	cri.RegisterRuntimeServiceServer(server, empty{})
	go func() { _ = server.Serve(l) }()
	defer server.Stop()
	m, heard := listens(t)
	defer m.watch(t.Context(), socket)()
	if err := heard.SetReadDeadline(time.Now().Add(wait.Limit)); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		buf := make([]byte, 100)
		n, err := heard.Read(buf)
		if err != nil || string(buf[:n]) != "WATCHDOG=1" {
			t.Fatalf("the manager heard %q, %v", buf[:n], err)
		}
	}
}

// A server that accepts calls but does not answer them is not reported as healthy.
func TestHungServerDoesNotNotifyTheWatchdog(t *testing.T) {
	t.Parallel()
	socket, l := listen(t, "s")
	var asked atomic.Int64
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			asked.Add(1)
			defer c.Close()
		}
	}()
	m, heard := listens(t)
	stop := m.watch(t.Context(), socket)
	wait.For(t, "the server to be asked a third time", func() bool { return asked.Load() >= 3 })
	stop()
	if err := heard.SetReadDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if n, err := heard.Read(make([]byte, 100)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the manager heard %d bytes, %v", n, err)
	}
}

// Processes that the server starts do not inherit the manager's variables.
func TestNotifyVariablesAreNotInherited(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "@abstract")
	t.Setenv("WATCHDOG_USEC", "3000000")
	t.Setenv("WATCHDOG_PID", "1")
	if m := findManager(); m != (manager{socket: "\x00abstract"}) {
		t.Errorf("%+v, and the watchdog waits for another process", m)
	}
	for _, name := range []string{"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} {
		if value, found := os.LookupEnv(name); found {
			t.Errorf("%s=%s is still there", name, value)
		}
	}
	t.Setenv("NOTIFY_SOCKET", "/run/notify")
	t.Setenv("WATCHDOG_USEC", "3000000")
	if m := findManager(); m != (manager{"/run/notify", 3 * time.Second}) {
		t.Errorf("%+v", m)
	}
}
