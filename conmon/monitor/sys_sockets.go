//go:build !386

package monitor

import "syscall"

const (
	sysAccept4 = syscall.SYS_ACCEPT4
	sysSendto  = syscall.SYS_SENDTO
	sysSendmsg = syscall.SYS_SENDMSG
	sysRecvmsg = syscall.SYS_RECVMSG
)
