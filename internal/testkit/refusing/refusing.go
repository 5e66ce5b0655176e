// Package refusing has a port that refuses connections for as long as a test
// takes. One that was listened on and closed may be somebody else's at once.
package refusing

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// Port is a TCP port of 127.0.0.1 and of ::1, where nobody listens and nobody else
// can.
func Port(t testing.TB) int {
	t.Helper()
	for range 100 {
		v4 := bind(t, unix.AF_INET, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
		name, err := unix.Getsockname(v4)
		if err != nil {
			t.Fatal(err)
		}
		port := name.(*unix.SockaddrInet4).Port
		if bind(t, unix.AF_INET6, &unix.SockaddrInet6{Port: port, Addr: [16]byte{15: 1}}) >= 0 {
			return port
		}
	}
	t.Fatal("each free port of 127.0.0.1 is in use on ::1")
	return 0
}

// bind returns a bound socket, or -1 if the address is in use.
func bind(t testing.TB, family int, address unix.Sockaddr) int {
	t.Helper()
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, address); errors.Is(err, unix.EADDRINUSE) {
		return -1
	} else if err != nil {
		t.Fatal(err)
	}
	return fd
}
