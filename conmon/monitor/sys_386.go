package monitor

// Package syscall knows socketcall(2) alone here. These came with Linux 4.3.
const (
	sysAccept4 = 364
	sysSendto  = 369
	sysSendmsg = 370
	sysRecvmsg = 372
)
