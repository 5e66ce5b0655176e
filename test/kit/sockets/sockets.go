// Package sockets provides the two ends of a connection in one process.
package sockets

import (
	"errors"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// Pair connects two unix sockets of a type, such as unix.SOCK_STREAM. They are
// closed with the test.
func Pair(t testing.TB, kind int) (conns [2]*net.UnixConn) {
	t.Helper()
	ends, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, fd := range ends {
		file := os.NewFile(uintptr(fd), "")
		conn, err := net.FileConn(file)
		if err := errors.Join(err, file.Close()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() }) // the test may have closed it
		conns[i] = conn.(*net.UnixConn)
	}
	return conns
}
