package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
)

// dialTime is far longer than a connection to a pod takes.
const dialTime = 5 * time.Second

// DialAddress connects from the node to a TCP port at the first of a pod's
// addresses that answers: the loopback of a virtual machine is unreachable. The
// error is fault.Unavailable if there are no addresses.
func DialAddress(ctx context.Context, addresses []string, port uint16) (*net.TCPConn, error) {
	dialer := net.Dialer{Timeout: dialTime}
	err := fmt.Errorf("the pod has no address of its own: %w", fault.Unavailable)
	for _, ip := range addresses {
		var conn net.Conn
		if conn, err = dialer.DialContext(ctx, "tcp", net.JoinHostPort(ip, strconv.Itoa(int(port)))); err == nil {
			return conn.(*net.TCPConn), nil
		}
	}
	return nil, fmt.Errorf("connect to TCP port %d at the pod's address: %w", port, err)
}

// DialLoopback connects to a TCP port at 127.0.0.1 or ::1 in a pinned network
// namespace, or on the node if the path is empty. The error is
// fault.Unavailable if the port is closed.
func DialLoopback(ctx context.Context, netns string, port uint16) (conn *net.TCPConn, err error) {
	loopbacks := []unix.Sockaddr{
		&unix.SockaddrInet4{Port: int(port), Addr: [4]byte{127, 0, 0, 1}},
		&unix.SockaddrInet6{Port: int(port), Addr: [16]byte(net.IPv6loopback)},
	}
	var errs []error
	for _, address := range loopbacks {
		if conn, err = connect(ctx, netns, address); err == nil {
			return conn, nil
		}
		errs = append(errs, err)
		if errors.Is(err, unix.ECONNRESET) { // somebody listens here
			break
		}
	}
	err = errors.Join(errs...)
	if errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("nothing listens on TCP port %d in the pod (only TCP can be forwarded): %w", port, fault.Unavailable)
	}
	return nil, fmt.Errorf("connect to TCP port %d: %w", port, err)
}

// connect makes a socket in the network namespace, where it stays, and connects
// it outside: a listener that does not accept blocks no thread.
func connect(ctx context.Context, netns string, address unix.Sockaddr) (*net.TCPConn, error) {
	family := unix.AF_INET
	if _, six := address.(*unix.SockaddrInet6); six {
		family = unix.AF_INET6
	}
	fd := -1
	open := func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	}
	var err error
	if netns != "" {
		err = ns.Do(netns, open)
	} else {
		err = open()
	}
	if err != nil {
		return nil, err
	}
	socket := os.NewFile(uintptr(fd), "socket")
	defer socket.Close()
	if err := unix.Connect(fd, address); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = socket.SetWriteDeadline(time.Unix(1, 0)) })()
	if err := awaitConnected(socket); err != nil {
		return nil, errors.Join(err, context.Cause(ctx))
	}
	conn, err := net.FileConn(socket) // a duplicate
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

// awaitConnected waits until a socket is connected or cannot be.
func awaitConnected(socket *os.File) error {
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	var failure error
	err = raw.Write(func(fd uintptr) bool {
		code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil || code != 0 {
			failure = errors.Join(err, unix.Errno(code))
			return true
		}
		_, err = unix.Getpeername(int(fd))
		return err == nil // otherwise it is still connecting
	})
	return errors.Join(err, failure)
}
