package monitor

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon/wire"
)

// lockDown takes from this process what it has no more use for, once it has
// nothing left to do but to copy, to write and to wait. What it copies is the
// container's: whoever found a way in by that would be root of the node. It stays
// root, who may write files, but gets no further from there.
//
// A monitor that runs further commands of the runtime cannot do without any of it:
// they inherit it.
func (m *monitor) lockDown() {
	if m.opt.Remote() || m.opt.Fifos {
		return
	}
	if err := refuseCalls(); err != nil {
		m.complain(wire.Fail("refuse system calls", err))
	}
}

// refused are the system calls that lead out of what this process is: to other
// programs, processes, namespaces, file systems, networks, and into the kernel. To
// refuse these, and not all but those in use, leaves Go's runtime free to call what
// its next version will.
var refused = [...]uint32{
	unix.SYS_EXECVE, unix.SYS_EXECVEAT,
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PIDFD_GETFD,
	unix.SYS_SETNS, unix.SYS_UNSHARE, unix.SYS_CHROOT, unix.SYS_PIVOT_ROOT,
	unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_OPEN_TREE, unix.SYS_MOVE_MOUNT, unix.SYS_MOUNT_SETATTR,
	unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_OPEN_BY_HANDLE_AT,
	unix.SYS_SOCKET, unix.SYS_CONNECT,
	unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_IO_URING_SETUP,
	unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL,
	unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_KEXEC_LOAD, unix.SYS_REBOOT,
}

// platform is what seccomp calls this architecture, and where it has the flags of
// clone(2); 0: that is not known.
func platform() (audit, cloneFlags uint32) {
	const firstArg = 16
	switch runtime.GOARCH {
	case "amd64":
		return unix.AUDIT_ARCH_X86_64, firstArg
	case "arm64":
		return unix.AUDIT_ARCH_AARCH64, firstArg
	case "ppc64le":
		return unix.AUDIT_ARCH_PPC64LE, firstArg
	case "riscv64":
		return unix.AUDIT_ARCH_RISCV64, firstArg
	case "s390x": // the second, in big endian
		return unix.AUDIT_ARCH_S390X, firstArg + 8 + 4
	}
	return 0, 0
}

// refuseCalls has the kernel answer EPERM to the calls in refused, to all those of
// another architecture, and to new threads that would have namespaces of their own,
// in all threads, none of which can get privileges by a program that has some.
func refuseCalls() error {
	audit, cloneFlags := platform()
	if audit == 0 {
		return syscall.ENOSYS
	}
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0); errno != 0 {
		return errno
	}
	filter := callFilter(audit, cloneFlags)
	program := syscall.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := syscall.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	return failed(errno)
}

// callFilter is a program for seccomp(2): it looks at the call's number, which is
// at 0 of struct seccomp_data, and its architecture, which is at 4.
func callFilter(audit, cloneFlags uint32) []syscall.SockFilter {
	const (
		load       = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal      = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		atLeast    = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
		hasAny     = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		answer     = unix.BPF_RET | unix.BPF_K
		x32        = 0x40000000 // amd64 has a second set of numbers from here on
		namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET
		refuse     = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
		lack       = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS) // so that clone is called instead, which can be looked into
	)
	filter := make([]syscall.SockFilter, 0, len(refused)+12)
	filter = append(filter,
		syscall.SockFilter{Code: load, K: 4},
		syscall.SockFilter{Code: equal, K: audit, Jt: 1},
		syscall.SockFilter{Code: answer, K: refuse},
		syscall.SockFilter{Code: load, K: 0},
		syscall.SockFilter{Code: equal, K: unix.SYS_CLONE3, Jf: 1},
		syscall.SockFilter{Code: answer, K: lack},
		syscall.SockFilter{Code: atLeast, K: x32, Jt: uint8(len(refused) + 4)})
	for i, call := range refused {
		filter = append(filter, syscall.SockFilter{Code: equal, K: call, Jt: uint8(len(refused) - i - 1 + 4)})
	}
	return append(filter,
		syscall.SockFilter{Code: equal, K: unix.SYS_CLONE, Jf: 2},
		syscall.SockFilter{Code: load, K: cloneFlags},
		syscall.SockFilter{Code: hasAny, K: namespaces, Jt: 1},
		syscall.SockFilter{Code: answer, K: unix.SECCOMP_RET_ALLOW},
		syscall.SockFilter{Code: answer, K: refuse})
}
