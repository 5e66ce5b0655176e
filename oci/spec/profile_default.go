package spec

import (
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// DefaultProfile returns crius's own seccomp profile for RuntimeDefault: an
// allow list.
//
// A call that the profile does not mention fails with ENOSYS, as on a kernel
// without it: libraries try new calls first and fall back on old ones, and
// calls that a future kernel adds must neither break them nor be reachable.
// Existing calls that are withheld fail with EPERM, so that programs report the
// true reason.
func DefaultProfile() *Profile {
	syscalls := []Rule{
		permit(fileCalls()), permit(memoryCalls()), permit(processCalls()),
		permit(signalCalls()), permit(timeCalls()), permit(waitingCalls()),
		permit(ipcCalls()), permit(networkCalls()), permit(machineCalls()),
	}
	syscalls = append(syscalls, conditionalCalls()...)
	for _, u := range unlockedCalls() {
		syscalls = append(syscalls, u.rules()...)
	}
	syscalls = append(syscalls, refuse(unix.EPERM, withheldCalls()))
	return &Profile{
		DefaultAction:   specs.ActErrno,
		DefaultErrnoRet: errno(unix.ENOSYS),
		ArchMap:         defaultArchs(),
		Syscalls:        syscalls,
	}
}

// defaultArchs lets the 32-bit programs of each processor family run.
func defaultArchs() []ArchGroup {
	return []ArchGroup{
		{specs.ArchX86_64, []specs.Arch{specs.ArchX86, specs.ArchX32}},
		{specs.ArchAARCH64, []specs.Arch{specs.ArchARM}},
		{specs.ArchMIPS64, []specs.Arch{specs.ArchMIPS, specs.ArchMIPS64N32}},
		{specs.ArchMIPSEL64, []specs.Arch{specs.ArchMIPSEL, specs.ArchMIPSEL64N32}},
		{specs.ArchPPC64LE, nil},
		{specs.ArchS390X, []specs.Arch{specs.ArchS390}},
		{specs.ArchRISCV64, nil},
		{specs.ArchLOONGARCH64, nil},
	}
}

func permit(names []string) Rule {
	return Rule{LinuxSyscall: specs.LinuxSyscall{Names: names, Action: specs.ActAllow}}
}

func refuse(number unix.Errno, names []string) Rule {
	return Rule{LinuxSyscall: specs.LinuxSyscall{Names: names, Action: specs.ActErrno, ErrnoRet: errno(number)}}
}

func errno(number unix.Errno) *uint {
	n := uint(number)
	return &n
}

// fileCalls work on files visible through the container's mounts; permissions,
// mounts and the device cgroup protect those files.
func fileCalls() []string {
	return []string{
		"_llseek", "access", "arm_fadvise64_64", "arm_sync_file_range", "chdir", "chmod",
		"chown", "chown32", "close", "close_range", "copy_file_range", "creat", "dup", "dup2",
		"dup3", "faccessat", "faccessat2", "fadvise64", "fadvise64_64", "fallocate", "fchdir",
		"fchmod", "fchmodat", "fchmodat2", "fchown", "fchown32", "fchownat", "fcntl", "fcntl64",
		"fdatasync", "fgetxattr", "flistxattr", "flock", "fremovexattr", "fsetxattr", "fstat",
		"fstat64", "fstatat64", "fstatfs", "fstatfs64", "fsync", "ftruncate", "ftruncate64",
		"futimesat", "getcwd", "getdents", "getdents64", "getxattr", "getxattrat", "ioctl",
		"lchown", "lchown32", "lgetxattr", "link", "linkat", "listxattr", "listxattrat",
		"llistxattr", "lremovexattr", "lseek", "lsetxattr", "lstat", "lstat64", "mkdir",
		"mkdirat", "mknod", "mknodat", "name_to_handle_at", "newfstatat", "open", "openat",
		"openat2", "pread64", "preadv", "preadv2", "pwrite64", "pwritev", "pwritev2", "read",
		"readahead", "readdir", "readlink", "readlinkat", "readv", "removexattr",
		"removexattrat", "rename", "renameat", "renameat2", "rmdir", "sendfile", "sendfile64",
		"setxattr", "setxattrat", "splice", "stat", "stat64", "statfs", "statfs64", "statx",
		"symlink", "symlinkat", "sync", "sync_file_range", "sync_file_range2", "syncfs", "tee",
		"truncate", "truncate64", "umask", "unlink", "unlinkat", "utime", "utimensat",
		"utimensat_time64", "utimes", "vmsplice", "write", "writev",
	}
}

func memoryCalls() []string {
	return []string{
		"brk", "cachestat", "madvise", "map_shadow_stack", "membarrier", "memfd_create",
		"memfd_secret", "mincore", "mlock", "mlock2", "mlockall", "mmap", "mmap2", "mprotect",
		"mremap", "mseal", "msync", "munlock", "munlockall", "munmap", "pkey_alloc",
		"pkey_free", "pkey_mprotect", "process_mrelease", "remap_file_pages",
	}
}

// processCalls start, end and describe processes and threads. A process can
// change identities and capabilities within its capability sets.
func processCalls() []string {
	return []string{
		"capget", "capset", "execve", "execveat", "exit", "exit_group", "fork", "futex",
		"futex_requeue", "futex_time64", "futex_wait", "futex_waitv", "futex_wake",
		"get_robust_list", "get_thread_area", "getcpu", "getegid", "getegid32", "geteuid",
		"geteuid32", "getgid", "getgid32", "getgroups", "getgroups32", "getpgid", "getpgrp",
		"getpid", "getppid", "getpriority", "getrandom", "getresgid", "getresgid32",
		"getresuid", "getresuid32", "getrlimit", "getrusage", "getsid", "gettid", "getuid",
		"getuid32", "ioprio_get", "ioprio_set", "landlock_add_rule", "landlock_create_ruleset",
		"landlock_restrict_self", "nice", "pidfd_open", "pidfd_send_signal", "prctl",
		"prlimit64", "rseq", "rseq_slice_yield", "sched_get_priority_max",
		"sched_get_priority_min", "sched_getaffinity", "sched_getattr", "sched_getparam",
		"sched_getscheduler", "sched_rr_get_interval", "sched_rr_get_interval_time64",
		"sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler",
		"sched_yield", "seccomp", "set_robust_list", "set_thread_area", "set_tid_address",
		"setfsgid", "setfsgid32", "setfsuid", "setfsuid32", "setgid", "setgid32", "setgroups",
		"setgroups32", "setpgid", "setpriority", "setregid", "setregid32", "setresgid",
		"setresgid32", "setresuid", "setresuid32", "setreuid", "setreuid32", "setrlimit",
		"setsid", "setuid", "setuid32", "sysinfo", "times", "ugetrlimit", "uname", "uprobe",
		"uretprobe", "vfork", "wait4", "waitid", "waitpid",
	}
}

func signalCalls() []string {
	return []string{
		"alarm", "kill", "pause", "restart_syscall", "rt_sigaction", "rt_sigpending",
		"rt_sigprocmask", "rt_sigqueueinfo", "rt_sigreturn", "rt_sigsuspend",
		"rt_sigtimedwait", "rt_sigtimedwait_time64", "rt_tgsigqueueinfo", "sigaction",
		"sigaltstack", "signal", "signalfd", "signalfd4", "sigpending", "sigprocmask",
		"sigreturn", "sigsuspend", "tgkill", "tkill",
	}
}

// timeCalls read clocks and wait for them. The adjusting calls also read, and
// adjust only with CAP_SYS_TIME.
func timeCalls() []string {
	return []string{
		"adjtimex", "clock_adjtime", "clock_adjtime64", "clock_getres", "clock_getres_time64",
		"clock_gettime", "clock_gettime64", "clock_nanosleep", "clock_nanosleep_time64",
		"getitimer", "gettimeofday", "nanosleep", "setitimer", "time", "timer_create",
		"timer_delete", "timer_getoverrun", "timer_gettime", "timer_gettime64",
		"timer_settime", "timer_settime64", "timerfd_create", "timerfd_gettime",
		"timerfd_gettime64", "timerfd_settime", "timerfd_settime64",
	}
}

// waitingCalls wait for events. io_uring is not among them: it runs other calls
// past this filter and has led to many sandbox escapes.
func waitingCalls() []string {
	return []string{
		"_newselect", "epoll_create", "epoll_create1", "epoll_ctl", "epoll_pwait",
		"epoll_pwait2", "epoll_wait", "eventfd", "eventfd2", "fanotify_mark",
		"inotify_add_watch", "inotify_init", "inotify_init1", "inotify_rm_watch", "io_cancel",
		"io_destroy", "io_getevents", "io_pgetevents", "io_pgetevents_time64", "io_setup",
		"io_submit", "pipe", "pipe2", "poll", "ppoll", "ppoll_time64", "pselect6",
		"pselect6_time64", "select",
	}
}

func ipcCalls() []string {
	return []string{
		"ipc", "mq_getsetattr", "mq_notify", "mq_open", "mq_timedreceive",
		"mq_timedreceive_time64", "mq_timedsend", "mq_timedsend_time64", "mq_unlink", "msgctl",
		"msgget", "msgrcv", "msgsnd", "semctl", "semget", "semop", "semtimedop",
		"semtimedop_time64", "shmat", "shmctl", "shmdt", "shmget",
	}
}

// networkCalls leave out socket, which depends on the family. socketcall, the
// one call for all on 32-bit x86 and s390, hides the family behind a pointer
// that a filter cannot follow; 32-bit C libraries still need it.
func networkCalls() []string {
	return []string{
		"accept", "accept4", "bind", "connect", "getpeername", "getsockname", "getsockopt",
		"listen", "recv", "recvfrom", "recvmmsg", "recvmmsg_time64", "recvmsg", "send",
		"sendmmsg", "sendmsg", "sendto", "setsockopt", "shutdown", "socketcall", "socketpair",
	}
}

// machineCalls exist on some processors only and affect only the caller's
// registers, caches and segments.
func machineCalls() []string {
	return []string{
		"arch_prctl", "breakpoint", "cacheflush", "get_tls", "modify_ldt",
		"riscv_flush_icache", "riscv_hwprobe", "s390_pci_mmio_read", "s390_pci_mmio_write",
		"s390_runtime_instr", "set_tls", "swapcontext",
	}
}

// conditionalCalls depend on an argument, the processor or the kernel.
func conditionalCalls() []Rule {
	rules := slices.Concat(socketFamilies(), personalities(), cloneFlags())
	// Before Linux 4.8 a tracer could change a call after the filter saw it.
	tracing := permit([]string{"process_vm_readv", "process_vm_writev", "ptrace"})
	tracing.Includes.MinKernel = "4.8"
	return append(rules, tracing)
}

// socketFamilies allows all families except AF_ALG, the kernel's crypto API,
// which gave local users root more than once (CVE-2026-31431), and AF_VSOCK,
// which ignores network namespaces and reaches the hypervisor. The kernel reads
// the family as an int: a comparison of the whole register would let
// 1<<32|AF_ALG pass, so blocks of families are matched under a mask of the low
// half.
func socketFamilies() []Rule {
	const low = 1<<32 - 1
	var rules []Rule
	for _, block := range []struct{ first, size uint64 }{
		{0, 32}, {32, 4}, {36, 2}, {39, 1}, {41, 1}, {42, 2}, {44, 4},
	} {
		r := permit([]string{"socket"})
		r.Args = []specs.LinuxSeccompArg{{
			Index: 0, Op: specs.OpMaskedEqual, Value: low &^ (block.size - 1), ValueTwo: block.first,
		}}
		rules = append(rules, r)
	}
	return rules
}

// personalities are those that only change the output of uname, and the query
// of the current one. Others disable address space randomization.
func personalities() []Rule {
	const (
		linux   = 0
		linux32 = 0x8
		uname26 = 0x20000
		query   = 0xffffffff
	)
	var rules []Rule
	for _, persona := range []uint64{linux, linux32, uname26, uname26 | linux32, query} {
		r := permit([]string{"personality"})
		r.Args = []specs.LinuxSeccompArg{{Index: 0, Op: specs.OpEqualTo, Value: persona}}
		rules = append(rules, r)
	}
	return rules
}

// cloneFlags permits creating threads and processes, and namespaces only with
// CAP_SYS_ADMIN. clone3 keeps its flags in memory, where a filter cannot see
// them; on ENOSYS, C libraries fall back on clone.
func cloneFlags() []Rule {
	const newNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS |
		unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET
	clone := func(index uint) Rule {
		r := permit([]string{"clone"})
		r.Args = []specs.LinuxSeccompArg{{Index: index, Op: specs.OpMaskedEqual, Value: newNamespaces}}
		r.Excludes.Caps = []string{"CAP_SYS_ADMIN"}
		return r
	}
	common, s390 := clone(0), clone(1) // on s390 the stack comes first
	common.Excludes.Arches = []string{"s390", "s390x"}
	s390.Includes.Arches = []string{"s390", "s390x"}

	clone3 := refuse(unix.ENOSYS, []string{"clone3"})
	clone3.Excludes.Caps = []string{"CAP_SYS_ADMIN"}

	admin := permit([]string{"clone", "clone3"})
	admin.Includes.Caps = []string{"CAP_SYS_ADMIN"}
	return []Rule{common, s390, clone3, admin}
}

// unlocked are calls that any one of some capabilities permits.
type unlocked struct{ caps, names []string }

// rules allow the calls for each capability and refuse them if the container
// has none of these.
func (u unlocked) rules() []Rule {
	var rules []Rule
	for _, name := range u.caps {
		r := permit(u.names)
		r.Includes.Caps = []string{name}
		rules = append(rules, r)
	}
	without := refuse(unix.EPERM, u.names)
	without.Excludes.Caps = u.caps
	return append(rules, without)
}

// unlockedCalls would fail in the kernel without the capability too. The filter
// keeps their code out of reach because exploits were found there.
func unlockedCalls() []unlocked {
	return []unlocked{
		{[]string{"CAP_SYS_ADMIN"}, []string{
			"fanotify_init", "fsconfig", "fsmount", "fsopen", "fspick", "listmount", "mount",
			"mount_setattr", "move_mount", "open_tree", "open_tree_attr", "quotactl",
			"quotactl_fd", "setdomainname", "sethostname", "setns", "statmount", "umount",
			"umount2", "unshare",
		}},
		{[]string{"CAP_SYS_ADMIN", "CAP_BPF"}, []string{"bpf"}},
		{[]string{"CAP_SYS_ADMIN", "CAP_PERFMON"}, []string{"perf_event_open"}},
		{[]string{"CAP_SYS_ADMIN", "CAP_SYSLOG"}, []string{"syslog"}},
		{[]string{"CAP_DAC_READ_SEARCH"}, []string{"open_by_handle_at"}},
		{[]string{"CAP_SYS_BOOT"}, []string{"reboot"}},
		{[]string{"CAP_SYS_CHROOT"}, []string{"chroot"}},
		{[]string{"CAP_SYS_MODULE"}, []string{"delete_module", "finit_module", "init_module"}},
		{[]string{"CAP_SYS_NICE"}, []string{"get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node"}},
		{[]string{"CAP_SYS_PACCT"}, []string{"acct"}},
		{[]string{"CAP_SYS_PTRACE"}, []string{"kcmp", "pidfd_getfd", "process_madvise"}},
		{[]string{"CAP_SYS_RAWIO"}, []string{"ioperm", "iopl"}},
		{[]string{"CAP_SYS_TIME"}, []string{"clock_settime", "clock_settime64", "settimeofday", "stime"}},
		{[]string{"CAP_SYS_TTY_CONFIG"}, []string{"vhangup"}},
	}
}

// withheldCalls are denied to every container: key rings and page moving ignore
// namespaces; the rest controls the whole machine or serves exploits more than
// programs.
func withheldCalls() []string {
	return []string{
		"add_key", "io_uring_enter", "io_uring_register", "io_uring_setup", "kexec_file_load",
		"kexec_load", "keyctl", "migrate_pages", "move_pages", "pivot_root", "request_key",
		"swapoff", "swapon", "userfaultfd", "vm86", "vm86old",
	}
}
