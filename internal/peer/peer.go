// Package peer names processes for messages: those at the other end of a unix
// socket, and those that hold a resource.
package peer

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Name returns the pid and name of a process, such as "process 12 (nginx)".
func Name(pid int32) string {
	name, err := os.ReadFile("/proc/" + strconv.Itoa(int(pid)) + "/comm")
	if pid <= 0 || err != nil {
		return "a process in another PID namespace"
	}
	return fmt.Sprintf("process %d (%s)", pid, strings.ToValidUTF8(strings.TrimSpace(string(name)), "?"))
}

// Of returns the name of the process that called listen on the socket to which
// a client's unix socket connection leads.
func Of(conn net.Conn) string {
	const unknown = "an unknown process"
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return unknown
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return unknown
	}
	var listener *unix.Ucred
	ctlErr := raw.Control(func(fd uintptr) { listener, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if ctlErr != nil || err != nil {
		return unknown
	}
	return Name(listener.Pid)
}
