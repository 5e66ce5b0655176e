package main

import (
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// calls makes system calls without effect, with arguments that the kernel
// refuses: the error shows whether the call reached the kernel.
func calls() map[string]string {
	runtime.LockOSThread()
	const (
		nowhere   = 1           // an invalid address
		noFD      = ^uintptr(0) // no open file
		noPID     = 1 << 22
		newUser   = unix.CLONE_NEWUSER
		cloneFS   = unix.CLONE_FS
		afALG     = unix.AF_ALG
		afVSOCK   = unix.AF_VSOCK
		dgram     = unix.SOCK_DGRAM
		noRandom  = 0x40000
		askWhich  = 0xffffffff
		ptAttach  = 16
		unknownOp = 9999
	)
	highBits := uintptr(1 << 31)
	highBits <<= 1 // 0 where words have 32 bits
	out := map[string]string{}
	for name, call := range map[string][4]uintptr{
		"mount":                {unix.SYS_MOUNT, nowhere, nowhere, nowhere},
		"unshare user":         {unix.SYS_UNSHARE, newUser},
		"setns":                {unix.SYS_SETNS, noFD, 0},
		"keyctl":               {unix.SYS_KEYCTL, unknownOp},
		"add_key":              {unix.SYS_ADD_KEY, nowhere, nowhere, 0},
		"request_key":          {unix.SYS_REQUEST_KEY, nowhere, nowhere, 0},
		"ptrace":               {unix.SYS_PTRACE, ptAttach, noPID, 0},
		"process_vm_readv":     {unix.SYS_PROCESS_VM_READV, noPID, 0, 0},
		"io_uring_setup":       {unix.SYS_IO_URING_SETUP, 0, nowhere},
		"socket inet":          {unix.SYS_SOCKET, 2, dgram, 0},
		"socket unix":          {unix.SYS_SOCKET, 1, dgram, 0},
		"socket netlink":       {unix.SYS_SOCKET, 16, 3, 0},
		"socket packet":        {unix.SYS_SOCKET, 17, 3, 0},
		"socket alg":           {unix.SYS_SOCKET, afALG, 5, 0},
		"socket alg high bits": {unix.SYS_SOCKET, highBits | afALG, 5, 0},
		"socket vsock":         {unix.SYS_SOCKET, afVSOCK, 1, 0},
		"socket qipcrtr":       {unix.SYS_SOCKET, 42, 2, 0},
		"clone user":           {unix.SYS_CLONE, newUser | cloneFS},
		"clone3":               {unix.SYS_CLONE3, 0, 0},
		"personality odd":      {unix.SYS_PERSONALITY, noRandom},
		"personality which":    {unix.SYS_PERSONALITY, askWhich},
		"perf_event_open":      {unix.SYS_PERF_EVENT_OPEN, nowhere, 0, noFD},
		"chroot":               {unix.SYS_CHROOT, nowhere},
		"quotactl":             {unix.SYS_QUOTACTL, 0, nowhere, 0},
		"userfaultfd":          {unix.SYS_USERFAULTFD, unknownOp},
		"memfd_create":         {unix.SYS_MEMFD_CREATE, nowhere, 0},
		"listns":               {unix.SYS_LISTNS, 0, 0},
		"getpid":               {unix.SYS_GETPID},
	} {
		_, _, errno := syscall.RawSyscall(call[0], call[1], call[2], call[3])
		out[name] = "ok"
		if errno != 0 {
			out[name] = errnoName(errno)
		}
	}
	return out
}

func errnoName(errno syscall.Errno) string {
	names := map[syscall.Errno]string{
		syscall.EPERM: "EPERM", syscall.ENOSYS: "ENOSYS", syscall.EFAULT: "EFAULT", syscall.EINVAL: "EINVAL",
		syscall.EBADF: "EBADF", syscall.ESRCH: "ESRCH", syscall.EAFNOSUPPORT: "EAFNOSUPPORT",
		syscall.EOPNOTSUPP: "EOPNOTSUPP", syscall.EACCES: "EACCES", syscall.ESOCKTNOSUPPORT: "ESOCKTNOSUPPORT",
	}
	if name, ok := names[errno]; ok {
		return name
	}
	return errno.Error()
}
