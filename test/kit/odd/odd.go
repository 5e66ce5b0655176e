// Package odd starts a program with everything changed that a process inherits,
// and reports what a process has inherited.
//
// A program that uses it calls [Main] before anything else: that program,
// started again, makes the changes.
package odd

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// variable says for what this program is started. descriptor and environment
// are the parts that containers must not inherit.
const (
	variable    = "CRIUS_ODD"
	descriptor  = "/dev/full"
	environment = "CRIUS_ODD_ENVIRONMENT"
)

// Main does what this process is started for, and returns if that is not this
// package's work.
func Main() {
	var err error
	switch os.Getenv(variable) {
	default:
		return
	case "run":
		err = run(os.Args[1:])
	case "report":
		err = report(os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "odd:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Wrapper returns a shell script that runs a program with the script's
// arguments, through this program, with everything changed as long as the file
// odd exists.
func Wrapper(program, odd string) (string, error) {
	self, err := os.Executable()
	return fmt.Sprintf("#!/bin/sh\nif [ -e %q ]; then exec env %s=run %q %q \"$@\"; fi\nexec %q \"$@\"\n",
		odd, variable, self, program, program), err
}

// Reporter returns a shell script that writes what it has inherited to a file.
func Reporter(file string) (string, error) {
	self, err := os.Executable()
	return fmt.Sprintf("#!/bin/sh\n%s=report exec %q %q\n", variable, self, file), err
}

func report(file string) error {
	state, err := Of(os.Getpid())
	if err != nil {
		return err
	}
	text, err := json.Marshal(state)
	if err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o600)
}

// Read returns what a Reporter has written.
func Read(file string) (state State, err error) {
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &state)
	}
	return state, err
}

// run changes what it can and executes the program.
func run(argv []string) error {
	runtime.LockOSThread()
	for what, change := range changes {
		if err := change(); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	if err := os.Unsetenv(variable); err != nil {
		return err
	}
	return syscall.Exec(argv[0], argv, append(os.Environ(), environment+"=1", "LISTEN_FDS=1", "NOTIFY_SOCKET=/nowhere"))
}

var changes = map[string]func() error{
	"affinity": func() error {
		var one unix.CPUSet
		if err := unix.SchedGetaffinity(0, &one); err != nil {
			return err
		}
		for cpu := range len(one) * 64 {
			if one.Count() > 1 {
				one.Clear(cpu)
			}
		}
		return unix.SchedSetaffinity(0, &one)
	},
	"scheduling": func() error {
		return unix.SchedSetAttr(0, &unix.SchedAttr{
			Size: unix.SizeofSchedAttr, Policy: unix.SCHED_BATCH, Nice: 7, Flags: unix.SCHED_FLAG_RESET_ON_FORK,
		}, 0)
	},
	"I/O priority": func() error {
		const idle = 3 << 13
		return sys(unix.SYS_IOPRIO_SET, 1, 0, idle)
	},
	"timer slack": func() error { return unix.Prctl(unix.PR_SET_TIMERSLACK, 40_000_000, 0, 0, 0) },
	"personality": func() error {
		const noRandom = 0x0040000
		return sys(unix.SYS_PERSONALITY, noRandom, 0, 0)
	},
	"umask":      func() error { unix.Umask(0o077); return nil },
	"directory":  func() error { return os.Chdir("/usr") },
	"descriptor": func() error { _, err := unix.Open(descriptor, unix.O_RDWR, 0); return err },
	"core dump filter": func() error {
		return os.WriteFile("/proc/self/coredump_filter", []byte("0x7f"), 0)
	},
	"huge pages": func() error { return unix.Prctl(unix.PR_SET_THP_DISABLE, 1, 0, 0, 0) },
	"memory policy": func() error {
		node := uint64(1)
		return unless(sys(unix.SYS_SET_MEMPOLICY, unix.MPOL_INTERLEAVE, uintptr(unsafe.Pointer(&node)), 64), unix.ENOSYS)
	},
	"memory merging": func() error {
		const setMemoryMerge = 67
		return unless(unix.Prctl(setMemoryMerge, 1, 0, 0, 0), unix.EINVAL)
	},
	"limits": func() error {
		for resource, l := range map[int]uint64{
			unix.RLIMIT_CORE: 0, unix.RLIMIT_STACK: 2 << 20, unix.RLIMIT_MEMLOCK: 64 << 10, unix.RLIMIT_SIGPENDING: 500,
			unix.RLIMIT_MSGQUEUE: 4096, unix.RLIMIT_NPROC: 5000, unix.RLIMIT_FSIZE: 1 << 40, unix.RLIMIT_DATA: 1 << 36, unix.RLIMIT_AS: 1 << 42,
		} {
			var now unix.Rlimit
			if err := unix.Getrlimit(resource, &now); err != nil {
				return err
			}
			now.Cur = l
			if mayRaise() {
				now.Max = l
			}
			if err := unix.Setrlimit(resource, &now); err != nil {
				return err
			}
		}
		return nil
	},
	"signals": func() error {
		blocked := uint64(1)<<(unix.SIGHUP-1) | 1<<(unix.SIGUSR1-1) | 1<<(unix.SIGTERM-1) | 1<<(unix.SIGCHLD-1) | 1<<(40-1)
		if err := sys(unix.SYS_RT_SIGPROCMASK, 0, uintptr(unsafe.Pointer(&blocked)), 0, 8); err != nil {
			return err
		}
		ignore := [5]uintptr{1}
		for s := uintptr(1); s <= 64; s++ {
			if s != uintptr(unix.SIGKILL) && s != uintptr(unix.SIGSTOP) {
				if err := sys(unix.SYS_RT_SIGACTION, s, uintptr(unsafe.Pointer(&ignore)), 0, 8); err != nil {
					return err
				}
			}
		}
		return nil
	},
	"speculation": func() error {
		const name, which = unix.PR_GET_SPECULATION_CTRL, unix.PR_SPEC_STORE_BYPASS
		state, _, errno := unix.RawSyscall6(unix.SYS_PRCTL, name, which, 0, 0, 0, 0)
		if errno != 0 || state&unix.PR_SPEC_PRCTL == 0 {
			return nil
		}
		return unix.Prctl(unix.PR_SET_SPECULATION_CTRL, which, unix.PR_SPEC_DISABLE, 0, 0)
	},
}

// unless returns err, but nil if it is the error of a kernel without the
// attribute.
func unless(err error, unknown unix.Errno) error {
	if errors.Is(err, unknown) {
		return nil
	}
	return err
}

// mayRaise reports whether a process may raise hard limits: otherwise it cannot
// undo that they were lowered.
func mayRaise() bool {
	header, data := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
	err := unix.Capget(&header, &data[0])
	return err == nil && data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

func sys(call uintptr, args ...uintptr) error {
	var a [6]uintptr
	copy(a[:], args)
	if _, _, errno := unix.RawSyscall6(call, a[0], a[1], a[2], a[3], a[4], a[5]); errno != 0 {
		return errno
	}
	return nil
}

// State is what a process has inherited, by name.
type State map[string]string

// Of reads the state of a process, from the node's /proc. It leaves out the
// limit of open files: containers get it from the server on purpose.
func Of(pid int) (State, error) {
	dir := fmt.Sprintf("/proc/%d/", pid)
	state := State{}
	attr, err := unix.SchedGetAttr(pid, 0)
	if err != nil {
		return nil, err
	}
	state["scheduling"] = fmt.Sprint("policy ", attr.Policy, ", nice ", attr.Nice, ", flags ", attr.Flags, ", clamps ", attr.Util_min, " ", attr.Util_max)
	priority, _, errno := unix.RawSyscall(unix.SYS_IOPRIO_GET, 1, uintptr(pid), 0)
	state["I/O priority"] = fmt.Sprint(priority, errno)
	for _, file := range []string{"timerslack_ns", "personality", "coredump_filter"} {
		text, err := os.ReadFile(dir + file)
		state[file] = fmt.Sprint(strings.TrimSpace(string(text)), err)
	}
	for file, names := range map[string][]string{
		"status": {"Umask", "SigIgn", "SigBlk", "NoNewPrivs", "Seccomp", "Cpus_allowed_list", "Mems_allowed_list",
			"Speculation_Store_Bypass", "SpeculationIndirectBranch", "THP_enabled"},
		"ksm_stat": {"ksm_merge_any"},
	} {
		text, _ := os.ReadFile(dir + file)
		for line := range strings.Lines(string(text)) {
			for _, name := range names {
				if value, ok := strings.CutPrefix(line, name+":"); ok {
					state[name] = strings.TrimSpace(value)
				}
			}
		}
	}
	text, err := os.ReadFile(dir + "limits")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		if name := line[:min(26, len(line))]; strings.HasPrefix(name, "Max ") {
			state[strings.TrimSpace(name)] = strings.Join(strings.Fields(line[26:]), " ")
		}
	}
	text, _ = os.ReadFile(dir + "numa_maps")
	if fields := strings.Fields(string(text)); len(fields) > 1 {
		state["memory policy"] = fields[1]
	}
	state.leaks(dir)
	return state, nil
}

// leaks records what exists only if it is the wrapper's.
func (state State) leaks(dir string) {
	files, _ := filepath.Glob(dir + "fd/*")
	for _, file := range files {
		if to, err := os.Readlink(file); err == nil && to == descriptor {
			state["descriptor"] = "of the server"
		}
	}
	text, _ := os.ReadFile(dir + "environ")
	for name := range strings.SplitSeq(string(text), "\x00") {
		switch name, _, _ = strings.Cut(name, "="); name {
		case environment:
			state["environment"] += name
		case "LISTEN_FDS", "NOTIFY_SOCKET":
			state["environment of the service"] += name + " "
		}
	}
	cwd, err := os.Readlink(dir + "cwd")
	state["directory"] = fmt.Sprint(cwd == "/usr", err)
}
