// Package refusing provides ports that refuse connections for as long as a test
// takes. Another process may take a port that was listened on and closed, and a
// port of 127.0.0.1 says nothing about the same port of ::1.
package refusing

import (
	"errors"
	"net"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// Port returns a TCP port of 127.0.0.1 and of ::1 on which nothing listens and
// nothing else can.
func Port(t testing.TB) int {
	t.Helper()
	for range attempts {
		port, _ := bind(t, "127.0.0.1", 0)
		if _, free := bind(t, "::1", port); free {
			return port
		}
	}
	t.Fatal("each free port of 127.0.0.1 is in use on ::1")
	return 0
}

// Listen listens on 127.0.0.1 or ::1, at a port that the other address refuses.
func Listen(t testing.TB, host string) net.Listener {
	t.Helper()
	other := map[string]string{"127.0.0.1": "::1", "::1": "127.0.0.1"}[host]
	for range attempts {
		port, _ := bind(t, other, 0)
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if errors.Is(err, unix.EADDRINUSE) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	t.Fatalf("each free port of %s is in use on %s", other, host)
	return nil
}

const attempts = 100

// bind reserves a port of host, 0 for a free one, or finds that it is in use.
func bind(t testing.TB, host string, port int) (taken int, free bool) {
	t.Helper()
	family, address := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}})
	if host == "::1" {
		family, address = unix.AF_INET6, &unix.SockaddrInet6{Port: port, Addr: [16]byte{15: 1}}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, address); errors.Is(err, unix.EADDRINUSE) {
		return 0, false
	} else if err != nil {
		t.Fatal(err)
	}
	bound, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	switch bound := bound.(type) {
	case *unix.SockaddrInet4:
		return bound.Port, true
	case *unix.SockaddrInet6:
		return bound.Port, true
	}
	t.Fatalf("bound to %v", bound)
	return 0, false
}
