package refusing

import (
	"errors"
	"net"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPort(t *testing.T) {
	port := strconv.Itoa(Port(t))
	for _, host := range []string{"127.0.0.1", "::1"} {
		address := net.JoinHostPort(host, port)
		if _, err := net.Dial("tcp", address); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("dial %s: %v", address, err)
		}
		if _, err := net.Listen("tcp", address); !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("listen on %s: %v", address, err)
		}
	}
}

func TestListen(t *testing.T) {
	for host, other := range map[string]string{"127.0.0.1": "::1", "::1": "127.0.0.1"} {
		port := strconv.Itoa(Listen(t, host).Addr().(*net.TCPAddr).Port)
		conn, err := net.Dial("tcp", net.JoinHostPort(host, port))
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		if _, err := net.Dial("tcp", net.JoinHostPort(other, port)); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s beside %s: %v", other, host, err)
		}
	}
}
