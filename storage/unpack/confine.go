package unpack

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/race"
)

// confine takes privileges from the calling thread, for good, that copying an image does not need.
// The programs that the thread starts inherit what remains: they cannot regain privileges, have the
// capabilities of unpackingNeeds, cannot make the system calls in refusedCalls and refused, and change
// files only below the directories writable.
//
// Without Landlock, which needs Linux 5.19, they may change files anywhere.
func confine(writable []string, refused []uint32) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl(PR_SET_NO_NEW_PRIVS)", err)
	}
	if err := writeOnlyBelow(writable); err != nil {
		return err
	}
	if err := dropCapabilities(); err != nil {
		return err
	}
	return refuseCalls(slices.Concat(refusedCalls, refused))
}

// unpackingNeeds are the capabilities without which some layers cannot be unpacked: owners, modes
// and file capabilities of any kind, devices, the chroot of the unpacking process, and
// trusted.overlay.* attributes, which need CAP_SYS_ADMIN.
const unpackingNeeds uint32 = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID |
	1<<unix.CAP_MKNOD | 1<<unix.CAP_SETFCAP | 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SYS_CHROOT

func dropCapabilities() error {
	for c := uintptr(0); ; c++ {
		if err := unix.Prctl(unix.PR_CAPBSET_READ, c, 0, 0, 0); err != nil {
			break // the kernel has no more capabilities
		}
		if unpackingNeeds>>c&1 != 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return os.NewSyscallError("prctl(PR_CAPBSET_DROP)", err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var have [2]unix.CapUserData
	if err := unix.Capget(&header, &have[0]); err != nil {
		return os.NewSyscallError("capget", err)
	}
	keep := [2]unix.CapUserData{}
	keep[0].Permitted = have[0].Permitted & unpackingNeeds
	keep[0].Effective = keep[0].Permitted
	return os.NewSyscallError("capset", unix.Capset(&header, &keep[0]))
}

// Landlock access rights. Rights that were added after the first version are used if the kernel has
// them.
const (
	writeFile = unix.LANDLOCK_ACCESS_FS_WRITE_FILE
	changes   = writeFile | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE |
		unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG |
		unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_MAKE_FIFO | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK |
		unix.LANDLOCK_ACCESS_FS_MAKE_SYM | unix.LANDLOCK_ACCESS_FS_REFER
	withRefer    = 2 // version; earlier ones allow no file to be moved between directories
	withTruncate = 3
)

// writeOnlyBelow lets the calling thread change files only below dirs, and mount nothing.
func writeOnlyBelow(dirs []string) error {
	version, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 || version < withRefer {
		return nil
	}
	attributes := unix.LandlockRulesetAttr{Handled_access_fs: changes}
	if version >= withTruncate {
		attributes.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	size := unsafe.Sizeof(attributes.Handled_access_fs) // the part that the first version knows
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attributes)), size, 0)
	if errno != 0 {
		return os.NewSyscallError("landlock_create_ruleset", errno)
	}
	rules := int(fd)
	defer unix.Close(rules)
	for _, dir := range dirs {
		if err := allowBelow(rules, dir, attributes.Handled_access_fs); err != nil {
			return err
		}
	}
	// Programs that are started without output open it.
	if err := allowBelow(rules, os.DevNull, attributes.Handled_access_fs&(writeFile|unix.LANDLOCK_ACCESS_FS_TRUNCATE)); err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(rules), 0, 0); errno != 0 {
		return os.NewSyscallError("landlock_restrict_self", errno)
	}
	return nil
}

func allowBelow(rules int, path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	rule := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(rules), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0)
	if errno != 0 {
		return fmt.Errorf("landlock_add_rule %s: %w", path, errno)
	}
	return nil
}

// refusedCalls, and unshare with any flag but CLONE_FS, lead to networks and local services, other processes and namespaces, mounts, and
// parts of the kernel that unpacking does not need. A list of refused calls, not of allowed ones,
// leaves Go's runtime and the libraries free to use new calls in later versions. Capabilities
// refuse others.
var refusedCalls = []uint32{
	unix.SYS_SOCKET, unix.SYS_SOCKETPAIR, unix.SYS_CONNECT, unix.SYS_BIND, // a datagram of either end of a pair goes to any name
	unix.SYS_SHMAT, unix.SYS_SHMCTL, unix.SYS_SEMCTL, unix.SYS_MSGCTL, unix.SYS_MSGSND, unix.SYS_MSGRCV, unix.SYS_MQ_OPEN, unix.SYS_MQ_UNLINK,
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PIDFD_GETFD,
	unix.SYS_SETNS,
	unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_OPEN_TREE, unix.SYS_OPEN_TREE_ATTR, unix.SYS_MOVE_MOUNT, unix.SYS_MOUNT_SETATTR,
	unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_OPEN_BY_HANDLE_AT,
	unix.SYS_FANOTIFY_INIT, // which opens the files that others open, by their mounts
	unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_IO_URING_SETUP,
	unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL,
	unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_SETHOSTNAME, unix.SYS_SETDOMAINNAME,
}

// refusedToUnpacker are further calls that crius-unpack does without. They change quotas and, of a file system of which the
// worker has but one directory, all: FIFREEZE stops it, XFS_IOC_OPEN_BY_HANDLE opens any file. Containers/storage in the worker that
// copies an image needs some.
var refusedToUnpacker = []uint32{unix.SYS_IOCTL, unix.SYS_QUOTACTL, unix.SYS_QUOTACTL_FD}

// architectures are those with a filter: their numbers for seccomp, and calls that exist on them
// alone. On s390x, Go makes all socket calls by one system call, and clone(2) has its flags
// elsewhere.
var architectures = map[string]struct {
	audit   uint32
	refused []uint32
}{
	"amd64":   {audit: unix.AUDIT_ARCH_X86_64},
	"arm":     {audit: unix.AUDIT_ARCH_ARM},
	"arm64":   {audit: unix.AUDIT_ARCH_AARCH64},
	"ppc64le": {unix.AUDIT_ARCH_PPC64LE, []uint32{102, 117}}, // socketcall(2) and ipc(2), which make all of them
	"riscv64": {audit: unix.AUDIT_ARCH_RISCV64},
}

// refuseCalls makes the kernel answer EPERM to some calls, to all calls of another architecture,
// and to new threads and processes with namespaces of their own, except the PID namespace in which
// the worker starts. A thread may have a root of its own. It does nothing on other architectures.
func refuseCalls(refused []uint32) error {
	here, known := architectures[runtime.GOARCH]
	if !known {
		return nil
	}
	filter := callFilter(here.audit, slices.Concat(refused, here.refused))
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
	return os.NewSyscallError("prctl(PR_SET_SECCOMP)", err)
}

// callFilter returns the program for seccomp(2). It reads struct seccomp_data, which has the number
// of the call at 0, its architecture at 4 and its first argument at 16.
func callFilter(architecture uint32, refused []uint32) []unix.SockFilter {
	const (
		load       = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal      = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		atLeast    = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
		hasAny     = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		answer     = unix.BPF_RET | unix.BPF_K
		x32        = 0x40000000 // first number of the second set of amd64
		namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWNET
		refuse     = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
		lack       = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS) // so that clone is called instead, whose flags a filter can see
	)
	filter := []unix.SockFilter{
		{Code: load, K: 4},
		{Code: equal, K: architecture, Jt: 1},
		{Code: answer, K: refuse},
		{Code: load, K: 0},
		{Code: atLeast, K: x32, Jf: 1},
		{Code: answer, K: refuse},
		{Code: equal, K: unix.SYS_CLONE3, Jf: 1},
		{Code: answer, K: lack},
	}
	for _, call := range refused {
		filter = append(filter, unix.SockFilter{Code: equal, K: call, Jf: 1}, unix.SockFilter{Code: answer, K: refuse})
	}
	return append(filter,
		unix.SockFilter{Code: equal, K: unix.SYS_UNSHARE, Jf: 4}, // package extract gives threads roots of their own
		unix.SockFilter{Code: load, K: 16},
		unix.SockFilter{Code: equal, K: unix.CLONE_FS, Jf: 1},
		unix.SockFilter{Code: answer, K: unix.SECCOMP_RET_ALLOW},
		unix.SockFilter{Code: answer, K: refuse},
		unix.SockFilter{Code: equal, K: unix.SYS_CLONE, Jf: 3},
		unix.SockFilter{Code: load, K: 16},
		unix.SockFilter{Code: hasAny, K: namespaces, Jf: 1},
		unix.SockFilter{Code: answer, K: refuse},
		unix.SockFilter{Code: answer, K: unix.SECCOMP_RET_ALLOW})
}

// Limits of a worker and of each process that it starts.
const (
	memory      = 1 << 30 // bytes of the process's own memory; beyond it a Go program ends
	workerFiles = 1024
)

// limit sets the limits of a worker.
func limit(pid int) error {
	limits := map[int]uint64{unix.RLIMIT_DATA: memory, unix.RLIMIT_NOFILE: workerFiles, unix.RLIMIT_CORE: 0}
	if race.Enabled { // it takes terabytes by that measure
		delete(limits, unix.RLIMIT_DATA)
	}
	for resource, most := range limits {
		if err := unix.Prlimit(pid, resource, &unix.Rlimit{Cur: most, Max: most}, nil); err != nil {
			return os.NewSyscallError("prlimit", err)
		}
	}
	// The kernel should kill a pull, which can be repeated, before anything else.
	path := fmt.Sprintf("/proc/%d/oom_score_adj", pid)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("1000")
	return errors.Join(err, f.Close())
}
