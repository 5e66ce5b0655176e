package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// listenConsole opens the socket over which the runtime will hand the master
// of the container's terminal.
func (m *monitor) listenConsole() error {
	path := m.opt.Dir + "/" + wire.ConsoleSocket
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
	m.console = fd
	return nil
}

// receiveConsole takes what a runtime that has ended has sent: it lies in the
// socket's queue.
func (m *monitor) receiveConsole() (master int, err error) {
	defer func() {
		syscall.Close(m.console)
		m.console = -1
		_ = wire.Unlink(m.opt.Dir, "/", wire.ConsoleSocket)
	}()
	conn, err := accept(m.console)
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
