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
