package inherit

import (
	"bytes"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Not in x/sys/unix.
const (
	prSetMemoryMerge = 67
	prGetMemoryMerge = 68
	prGetMDWE        = 66
)

// signals is the number of Linux signals on the architectures for which crius
// is built.
const signals = 64

// handleIgnoredSignals ignores, by a handler, the signals that this process was started
// to ignore: Go resets signals with a handler to their default in children. A
// blocked signal must not end the process when Thread unblocks it.
func handleIgnoredSignals() {
	ignored, blocked := signalSets()
	discarded := make(chan os.Signal, 1) // full for good after the first signal
	for s := unix.Signal(1); s <= signals; s++ {
		bit := uint64(1) << (s - 1)
		switch {
		case ignored&bit != 0 && s >= 32 && s <= 34: // reserved by C libraries: Go cannot handle them
			byDefault(s)
		case ignored&bit != 0, blocked&bit != 0 && s == unix.SIGHUP:
			signal.Notify(discarded, s)
		}
	}
}

func signalSets() (ignored, blocked uint64) {
	text, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		return 0, 0
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		set, _ := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		switch name {
		case "SigIgn":
			ignored = set
		case "SigBlk":
			blocked = set
		}
	}
	return ignored, blocked
}

func byDefault(s unix.Signal) {
	var action [5]uintptr // handler, flags, restorer, and a mask of 64 bits: SIG_DFL
	_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(s), uintptr(unsafe.Pointer(&action)), 0, signals/8, 0, 0)
}

// limit is a resource limit with the kernel's default; a hard limit of 0 means
// that of PID 1, because its default depends on the machine.
type limit struct {
	name       string
	resource   int
	soft, hard uint64
}

// limits are those that a container gets from the node. They do not include the
// limit of open files, which operators set for containers in the unit
// (LimitNOFILE=), nor those of nice and real-time priority, whose default is
// the lowest value.
func limits() []limit {
	const unlimited = unix.RLIM_INFINITY
	return []limit{
		{"CPU time limit", unix.RLIMIT_CPU, unlimited, unlimited},
		{"file size limit", unix.RLIMIT_FSIZE, unlimited, unlimited},
		{"data size limit", unix.RLIMIT_DATA, unlimited, unlimited},
		{"stack size limit", unix.RLIMIT_STACK, 8 << 20, unlimited},
		{"core file size limit", unix.RLIMIT_CORE, 0, unlimited},
		{"resident set limit", unix.RLIMIT_RSS, unlimited, unlimited},
		{"process limit", unix.RLIMIT_NPROC, unlimited, 0},
		{"locked memory limit", unix.RLIMIT_MEMLOCK, 8 << 20, 8 << 20},
		{"address space limit", unix.RLIMIT_AS, unlimited, unlimited},
		{"file lock limit", unix.RLIMIT_LOCKS, unlimited, unlimited},
		{"pending signal limit", unix.RLIMIT_SIGPENDING, unlimited, 0},
		{"message queue limit", unix.RLIMIT_MSGQUEUE, 800 << 10, 800 << 10},
		{"real-time CPU limit", unix.RLIMIT_RTTIME, unlimited, unlimited},
	}
}

// raise raises the limit if it is below the default. A higher one was set by
// the operator, for containers.
func (l limit) raise() error {
	var own unix.Rlimit
	if err := unix.Prlimit(0, l.resource, nil, &own); err != nil {
		return err
	}
	wanted := unix.Rlimit{Max: max(own.Max, l.hardest())}
	wanted.Cur = max(own.Cur, min(l.soft, wanted.Max))
	if wanted == own {
		return nil
	}
	err := unix.Prlimit(0, l.resource, &wanted, nil)
	if err == nil || wanted.Max == own.Max {
		return err
	}
	// Without CAP_SYS_RESOURCE, raise up to the hard limit.
	_ = unix.Prlimit(0, l.resource, &unix.Rlimit{Cur: max(own.Cur, min(l.soft, own.Max)), Max: own.Max}, nil)
	return fmt.Errorf("%d instead of %s: %w", own.Max, limitText(wanted.Max), err)
}

func (l limit) hardest() uint64 {
	var first unix.Rlimit
	if l.hard == 0 && unix.Prlimit(1, l.resource, nil, &first) == nil {
		return first.Max
	}
	return l.hard
}

func limitText(n uint64) string {
	if n == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return strconv.FormatUint(n, 10)
}

// resetDumpFilter copies the filter of PID 1, because the kernel's command line
// may set another default.
func resetDumpFilter() error {
	const own = "/proc/self/coredump_filter"
	now, err := os.ReadFile(own)
	if err != nil {
		return nil //nolint:nilerr // a kernel that dumps no core
	}
	node, err := os.ReadFile("/proc/1/coredump_filter")
	if err != nil || bytes.Equal(now, node) {
		return nil //nolint:nilerr // of what nobody can tell nothing is known to be wrong
	}
	return os.WriteFile(own, append([]byte("0x"), bytes.TrimSpace(node)...), 0)
}

// permanent lists what no process can undo.
func permanent() (left []string) {
	for _, p := range []struct {
		get  int
		text string
	}{
		{unix.PR_GET_NO_NEW_PRIVS, "no_new_privs (NoNewPrivileges= of the unit): set-user-ID programs and file capabilities have no effect in containers"},
		{unix.PR_GET_SECCOMP, "seccomp filter (SystemCallFilter= and others of the unit): it applies to containers, privileged ones too"},
		{prGetMDWE, "MemoryDenyWriteExecute= of the unit: programs in containers that generate code fail"},
	} {
		if now, _, errno := unix.RawSyscall6(unix.SYS_PRCTL, uintptr(p.get), 0, 0, 0, 0, 0); errno == 0 && now != 0 {
			left = append(left, p.text)
		}
	}
	return left
}

func number(text string) (int, bool) {
	n, err := strconv.Atoi(text)
	return n, err == nil
}
