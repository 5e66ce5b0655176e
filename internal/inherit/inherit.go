// Package inherit keeps what the server was started with from the processes that it
// starts: a unit with Nice= or CPUAffinity=, or the shell of an operator, is about the
// server, and a container is what its spec says (docs/decisions/0056-inheritance.md).
//
// What belongs to a thread (CPU affinity, nice value, I/O priority and their like) the
// server keeps: Start resets it on a thread of its own, whose children inherit the reset
// values. What belongs to the process as a whole (resource limits, core dump filter) can
// only be reset for both, which Process does once.
package inherit

import (
	"os"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/thread"
)

// Umask is what every program of crius sets before it does anything else: with a stricter
// one the directories that it makes, of which some last, would be closed to containers.
const Umask = 0o022

// Start calls start, which starts a process, on a thread that Thread has reset. The thread
// ends with start, so a parent death signal is possible only if start waits for the process.
func Start(start func() error) error {
	return thread.Run(func() error {
		Thread()
		return start()
	})
}

// Thread gives the calling thread, which must be one of thread.Run's, the attributes that
// a process inherits of a node on which nobody has changed them. What this process may not
// change stays as it is: Process has reported it.
func Thread() {
	for _, a := range attributes() {
		_ = a.reset()
	}
}

// Process resets what belongs to the process as a whole, and returns what neither it nor
// Thread can reset, one sentence for each. It is called once, before the first process is
// started.
func Process() (left []string) {
	hearSignals()
	closeOnExec()
	note := func(name string, err error) {
		if err != nil {
			left = append(left, name+": "+err.Error())
		}
	}
	for _, l := range limits() {
		note(l.name, l.raise())
	}
	note("core dump filter", resetDumpFilter())
	note("disabled transparent huge pages", unset(unix.PR_GET_THP_DISABLE, unix.PR_SET_THP_DISABLE))
	note("memory merging (KSM)", unset(prGetMemoryMerge, prSetMemoryMerge))
	_ = thread.Run(func() error {
		for _, a := range attributes() {
			note(a.name, a.reset())
		}
		return nil
	})
	return append(left, permanent()...)
}

// Environ is the environment of programs that run containers or are told of them: this
// process's own, without what is about this process alone.
func Environ() []string {
	private := []string{
		"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "FDSTORE", "MAINPID", "MANAGERPID",
		"INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "CREDENTIALS_DIRECTORY",
		"GOMEMLIMIT", // of the unit that comes with crius
	}
	return slices.DeleteFunc(os.Environ(), func(e string) bool {
		name, _, _ := strings.Cut(e, "=")
		return slices.Contains(private, name)
	})
}

// closeOnExec keeps descriptors that this process was started with from its children.
func closeOnExec() {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return
	}
	for _, e := range entries {
		if fd, ok := number(e.Name()); ok && fd > 2 {
			syscall.CloseOnExec(fd)
		}
	}
}
