package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// console is the socket over which the runtime hands the master of the container's
// terminal, while it creates the container.
type console struct{ fd int }

// listen opens it in the container's directory.
func (c *console) listen(dir string) error {
	path := dir + "/" + wire.ConsoleSocket
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		return wire.Fail("open console socket", err)
	}
	_ = wire.Unlink(path)
	if err = syscall.Fchmod(fd, 0o600); err == nil { // bind gives the file this mode
		err = syscall.Bind(fd, &syscall.SockaddrUnix{Name: path})
	}
	if err == nil {
		err = syscall.Listen(fd, 1)
	}
	if err != nil {
		syscall.Close(fd)
		return wire.Fail("listen on console socket "+path, err)
	}
	c.fd = fd
	return nil
}

// receive takes what a runtime that has ended has sent: it lies in the socket's queue.
func (c *console) receive(dir string) (master int, err error) {
	defer func() {
		syscall.Close(c.fd)
		c.fd = -1
		_ = wire.Unlink(dir, "/", wire.ConsoleSocket)
	}()
	conn, err := accept(c.fd)
	if err != nil {
		return -1, wire.Fail("the runtime reports success, but has not connected to the console socket", err)
	}
	defer syscall.Close(conn)
	var name [256]byte
	control := make([]byte, syscall.CmsgSpace(4*4))
	_, n, _, _, err := syscall.Recvmsg(conn, name[:], control, syscall.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, wire.Fail("receive terminal from the runtime", err)
	}
	master = -1
	for _, fd := range sentDescriptors(control[:n]) {
		if master < 0 && isTerminal(fd) {
			master = fd
		} else {
			syscall.Close(fd)
		}
	}
	if master < 0 {
		return -1, wire.Text("the runtime reports success, but has sent no terminal")
	}
	return master, nil
}

func sentDescriptors(control []byte) (fds []int) {
	messages, err := syscall.ParseSocketControlMessage(control)
	if err != nil {
		return nil
	}
	for i := range messages {
		if more, err := syscall.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, more...)
		}
	}
	return fds
}
