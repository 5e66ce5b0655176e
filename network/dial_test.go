package network

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/refusing"
)

func TestDialLoopback(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"127.0.0.1", "::1"} {
		l := refusing.Listen(t, address)
		conn, err := DialLoopback(t.Context(), "", uint16(l.Addr().(*net.TCPAddr).Port))
		if err != nil {
			t.Fatalf("%s: %v", address, err)
		}
		defer conn.Close()
		other, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(other, "hello")
		other.Close()
		if text, err := io.ReadAll(conn); string(text) != "hello" {
			t.Errorf("%s: %q, %v", address, text, err)
		}
	}
}

func TestDialLoopbackRefused(t *testing.T) {
	t.Parallel()
	conn, err := DialLoopback(t.Context(), "", uint16(refusing.Port(t)))
	if !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "TCP port") {
		t.Errorf("%v, %v", conn, err)
	}
}

// A listener that does not accept costs neither a thread nor more time than the
// caller has.
func TestDialLoopbackThatHangs(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(name.(*unix.SockaddrInet4).Port)
	first, err := DialLoopback(t.Context(), "", port) // fills the queue
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	threads := func() int {
		entries, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	const callers = 50
	before := threads()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	ended := make(chan error, callers)
	for range callers {
		go func() {
			_, err := DialLoopback(ctx, "", port)
			ended <- err
		}()
	}
	<-ctx.Done()
	if after := threads(); after > before+callers/2 {
		t.Errorf("%d threads, before %d", after, before)
	}
	for range callers {
		if err := <-ended; !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, fault.Unavailable) {
			t.Errorf("ended with %v", err)
		}
	}
}
