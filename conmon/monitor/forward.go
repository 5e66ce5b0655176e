package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// forwardVerb in the place of the first argument makes this program the far end of
// a connection from outside: it runs in a pod's own container, in a runtime sandbox with a
// network stack of its own, whose loopback nobody else can reach.
const forwardVerb = "forward"

// forward connects to a TCP port of the loopback and copies: standard input goes
// there, what comes from there goes to standard output, and each end is passed on.
// On standard error a full stop says that it is connected, or a line why not.
func forward(args []string) int {
	port, ok := uint64(0), false
	if len(args) == 1 {
		port, ok = wire.Number([]byte(args[0]))
	}
	if !ok || port == 0 || port > 1<<16-1 {
		return refuse(wire.Text("forward needs a port"))
	}
	fd, err := connectLoopback(int(port))
	if err != nil {
		return refuse(wire.Fail("connect to port "+itoa(int(port)), err))
	}
	_, _ = syscall.Write(2, []byte{'.'})
	sent := make(chan struct{})
	go func() {
		copyAll(fd, 0)
		_ = syscall.Shutdown(fd, syscall.SHUT_WR)
		close(sent)
	}()
	copyAll(1, fd)
	syscall.Close(1)
	<-sent
	return 0
}

func refuse(err error) int {
	_, _ = syscall.Write(2, []byte(err.Error()))
	return 1
}

func connectLoopback(port int) (int, error) {
	six := syscall.SockaddrInet6{Port: port}
	six.Addr[15] = 1
	var err error
	for _, address := range [...]syscall.Sockaddr{&syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}, &six} {
		family := syscall.AF_INET
		if address == syscall.Sockaddr(&six) {
			family = syscall.AF_INET6
		}
		fd, failed := syscall.Socket(family, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if failed == nil {
			if failed = syscall.Connect(fd, address); failed == nil {
				return fd, nil
			}
			syscall.Close(fd)
		}
		if err == nil {
			err = failed
		}
	}
	return -1, err
}

// copyAll copies until one side has no more or the other wants no more.
func copyAll(to, from int) {
	buf := make([]byte, 32<<10)
	for {
		n, err := syscall.Read(from, buf)
		if err == syscall.EINTR {
			continue
		}
		if n <= 0 {
			return
		}
		for rest := buf[:n]; len(rest) > 0; {
			n, err := syscall.Write(to, rest)
			if err == syscall.EINTR {
				continue
			}
			if err != nil {
				return
			}
			rest = rest[n:]
		}
	}
}
