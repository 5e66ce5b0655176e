//go:build amd64 || arm || arm64 || ppc64le || riscv64

package monitor

import (
	"syscall"
	"unsafe"
)

// refused are the system calls that lead out of what this process is: to other
// programs, processes, namespaces, file systems, networks, and into the kernel. To
// refuse these, and not all but those in use, leaves Go's runtime free to call what
// its next version will. What one architecture alone has is in refusedHere.
var refused = [...]uint32{
	syscall.SYS_EXECVE, sysExecveat,
	syscall.SYS_PTRACE, sysProcessVMReadv, sysProcessVMWritev, sysPidfdGetfd,
	sysSetns, syscall.SYS_UNSHARE, syscall.SYS_CHROOT, syscall.SYS_PIVOT_ROOT,
	syscall.SYS_MOUNT, syscall.SYS_UMOUNT2, sysOpenTree, sysMoveMount, sysMountSetattr,
	sysFsopen, sysFsconfig, sysFsmount, sysOpenByHandleAt,
	syscall.SYS_SOCKET, syscall.SYS_CONNECT,
	sysBPF, syscall.SYS_PERF_EVENT_OPEN, sysUserfaultfd, sysIOUringSetup,
	syscall.SYS_ADD_KEY, syscall.SYS_REQUEST_KEY, syscall.SYS_KEYCTL,
	syscall.SYS_INIT_MODULE, sysFinitModule, syscall.SYS_DELETE_MODULE,
	syscall.SYS_KEXEC_LOAD, sysKexecFileLoad, syscall.SYS_SWAPON, syscall.SYS_REBOOT,
}

// What package syscall lacks on every architecture.
const (
	sysIOUringSetup = 425
	sysOpenTree     = 428
	sysMoveMount    = 429
	sysFsopen       = 430
	sysFsconfig     = 431
	sysFsmount      = 432
	sysClone3       = 435
	sysPidfdGetfd   = 438
	sysMountSetattr = 442

	setModeFilter = 1 // of seccomp(2)
	allThreads    = 1
)

// refuseCalls has the kernel answer EPERM to the calls in refused, to all those of
// another architecture, and to new threads that would have namespaces of their own,
// in all threads, none of which can get privileges by a program that has some.
func refuseCalls() error {
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, setNoNewPrivs, 1, 0); errno != 0 {
		return errno
	}
	var filter [filterLength]syscall.SockFilter
	writeFilter(&filter)
	program := syscall.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := syscall.RawSyscall(sysSeccomp, setModeFilter, allThreads, uintptr(unsafe.Pointer(&program)))
	return failed(errno)
}

// filterLength is the number of instructions before, for, and after the calls that are
// refused.
const (
	refusals     = len(refused) + len(refusedHere)
	filterLength = 7 + refusals + 5
)

// writeFilter writes a program for seccomp(2): it looks at the call's number, which
// is at 0 of struct seccomp_data, and its architecture, which is at 4. The caller
// has the program on its stack: on the heap it would occupy pages of its own for as
// long as the monitor lives.
func writeFilter(filter *[filterLength]syscall.SockFilter) {
	const (
		load       = syscall.BPF_LD | syscall.BPF_W | syscall.BPF_ABS
		equal      = syscall.BPF_JMP | syscall.BPF_JEQ | syscall.BPF_K
		atLeast    = syscall.BPF_JMP | syscall.BPF_JGE | syscall.BPF_K
		hasAny     = syscall.BPF_JMP | syscall.BPF_JSET | syscall.BPF_K
		answer     = syscall.BPF_RET | syscall.BPF_K
		cloneFlags = 16         // where the first argument is
		x32        = 0x40000000 // amd64 has a second set of numbers from here on
		newCgroup  = 0x02000000
		namespaces = syscall.CLONE_NEWNS | newCgroup | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET
		allow      = 0x7fff0000
		withError  = 0x00050000
		refuse     = withError | uint32(syscall.EPERM)
		lack       = withError | uint32(syscall.ENOSYS) // so that clone is called instead, which can be looked into
	)
	first := copy(filter[:], []syscall.SockFilter{
		{Code: load, K: 4},
		{Code: equal, K: audit, Jt: 1},
		{Code: answer, K: refuse},
		{Code: load, K: 0},
		{Code: equal, K: sysClone3, Jf: 1},
		{Code: answer, K: lack},
		{Code: atLeast, K: x32, Jt: uint8(refusals + 4)},
	})
	at := first
	for _, calls := range [...][]uint32{refused[:], refusedHere[:]} {
		for _, call := range calls {
			filter[at] = syscall.SockFilter{Code: equal, K: call, Jt: uint8(first + refusals - at - 1 + 4)}
			at++
		}
	}
	copy(filter[at:], []syscall.SockFilter{
		{Code: equal, K: syscall.SYS_CLONE, Jf: 2},
		{Code: load, K: cloneFlags},
		{Code: hasAny, K: namespaces, Jt: 1},
		{Code: answer, K: allow},
		{Code: answer, K: refuse},
	})
}
