// Package peer names processes for messages: those at the other end of a unix
// socket, and those that hold a resource.
package peer

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Name returns the pid and name of a process, such as "process 12 (nginx)".
func Name(pid int32) string {
	name := command(pid)
	if name == "" {
		return "a process in another PID namespace"
	}
	return fmt.Sprintf("process %d (%s)", pid, name)
}

// Process is a process as it was when it connected.
type Process struct {
	PID  int32  // 0: unknown, or in another PID namespace
	UID  uint32 // of its user
	Name string // that it has chosen; empty: unknown
}

// Caller returns the process that has connected to a unix socket, as the kernel knows it; zero
// if it is unknown.
func Caller(conn net.Conn) Process {
	who, err := credentials(conn)
	if err != nil {
		return Process{}
	}
	return Process{PID: who.Pid, UID: who.Uid, Name: command(who.Pid)}
}

// command returns the name of a process; empty if it is unknown.
func command(pid int32) string {
	name, err := os.ReadFile("/proc/" + strconv.Itoa(int(pid)) + "/comm")
	if pid <= 0 || err != nil {
		return ""
	}
	return strings.ToValidUTF8(strings.TrimSpace(string(name)), "?")
}

// Of returns the name of the process that called listen on the socket to which
// a client's unix socket connection leads.
func Of(conn net.Conn) string {
	listener, err := credentials(conn)
	if err != nil {
		return "an unknown process"
	}
	return Name(listener.Pid)
}

// credentials are those of the process at the other end of a unix socket, also behind wrappers
// that have NetConn.
func credentials(conn net.Conn) (who *unix.Ucred, err error) {
	for {
		wrapper, ok := conn.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		conn = wrapper.NetConn()
	}
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("%T is not a unix socket", conn)
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil, err
	}
	ctlErr := raw.Control(func(fd uintptr) { who, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return who, errors.Join(ctlErr, err)
}
