// Package inherit keeps processes that the server starts from inheriting the
// server's own settings: a unit with Nice= or CPUAffinity=, or an operator's
// shell, configures the server, whereas a container is configured by its spec
// (docs/decisions/0056-inheritance.md).
//
// The server keeps attributes of threads (CPU affinity, nice value, I/O
// priority and the like): Start resets them on its own thread, whose children
// inherit the reset values. Attributes of the process as a whole (resource
// limits, core dump filter) can only be reset for both, which Process does
// once.
package inherit

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/thread"
)

// Umask is set by every crius program before it does anything else: with a
// stricter one, containers could not enter the directories that the program
// makes, and some of these persist.
const Umask = 0o022

// Start calls start, which starts a process, on a thread that Thread has reset.
// The thread ends with start, so a parent death signal is possible only if
// start waits for the process. Errors are those of Explain.
func Start(start func() error) error {
	return Explain(thread.Run(func() error {
		Thread()
		return start()
	}))
}

// Explain returns the error of a process that could not be started: err, and as
// fault.Exhausted, with what to do, if the kernel allows no more processes
// (fork(2), EAGAIN).
func Explain(err error) error {
	if errors.Is(err, unix.EAGAIN) {
		return crowded(err)
	}
	return err
}

// withoutRoom matches what programs say if the kernel allows them no more
// processes or threads: Go's runtime, also with cgo, and Go programs that start
// others. The pull worker and the shim monitor, which are started often, never
// need it.
var withoutRoom = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`failed to create new OS thread \(have \d+ already; errno=11\)|pthread_create failed: Resource temporarily unavailable|fork/exec [^\s:]+: resource temporarily unavailable`)
})

// WithoutRoom returns the words in the output of a program that say that it got
// no room for a thread or process, without the stack that may follow; "" if
// there are none.
func WithoutRoom(said string) string { return withoutRoom().FindString(said) }

// ExplainOutput is Explain for a program that started and failed with err,
// having said something: it may have got no room for its own threads and
// processes. The error has the words that say so.
func ExplainOutput(err error, said string) error {
	words := WithoutRoom(said)
	switch {
	case words == "" || err == nil || errors.Is(err, fault.Exhausted): // explained already
		return err
	case strings.Contains(err.Error(), words):
		return crowded(err)
	}
	return crowded(fmt.Errorf("%w: %s", err, words))
}

func crowded(err error) error {
	full := limitReached("/")
	if full == "" {
		full = "the node, or a cgroup of crius, has as many processes and threads as it may have (kernel.pid_max, kernel.threads-max or pids.max)"
	}
	return fmt.Errorf("%w: %s: find out which pod has them, or raise the limit: %w", err, full, fault.Exhausted)
}

// limitReached names a limit of processes and threads that leaves this process no room for what a
// program needs, and how many there are; "" if there is none, or that is unknown. Some may have ended
// since one could not be started.
func limitReached(root string) string {
	const needed = 16
	read := func(file string) string {
		text, _ := os.ReadFile(root + file)
		return strings.TrimSpace(string(text))
	}
	full := func(whose, name, tasks, most string) string {
		n, err := strconv.ParseUint(tasks, 10, 64)
		m, wrong := strconv.ParseUint(most, 10, 64) // "max" is no limit
		if err != nil || wrong != nil || n+needed <= m {
			return ""
		}
		return fmt.Sprintf("%s has as many processes and threads as it may have (%d of %s %d)", whose, n, name, m)
	}
	for line := range strings.Lines(read("proc/self/cgroup")) { // 0::/a/b, 8:pids:/a/b
		id := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(id) < 3 || id[1] != "" && id[1] != "pids" {
			continue
		}
		for at := id[2]; ; at = path.Dir(at) {
			dir := path.Join("sys/fs/cgroup", id[1], at) + "/"
			if found := full("the cgroup "+at, "pids.max", read(dir+"pids.current"), read(dir+"pids.max")); found != "" {
				return found
			}
			if len(at) < 2 {
				break
			}
		}
	}
	_, tasks, _ := strings.Cut(read("proc/loadavg"), "/")
	tasks, _, _ = strings.Cut(tasks, " ")
	return cmp.Or(full("the node", "kernel.pid_max", tasks, read("proc/sys/kernel/pid_max")),
		full("the node", "kernel.threads-max", tasks, read("proc/sys/kernel/threads-max")))
}

// Thread gives the calling thread, which must be one of thread.Run's, the
// inheritable attributes that the kernel gives by default. What this process
// may not change stays as it is: Process has reported it.
func Thread() {
	for _, a := range attributes() {
		_ = a.reset()
	}
}

// Process resets attributes of the process as a whole, and returns what neither
// it nor Thread can reset, one sentence for each. It is called once, before the
// first process is started.
func Process() (left []string) {
	handleIgnoredSignals()
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

// Environ returns the environment for programs that run containers or are
// notified of them: this process's own, without variables that concern only
// this process.
func Environ() []string {
	private := []string{
		"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "FDSTORE", "MAINPID", "MANAGERPID",
		"INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "CREDENTIALS_DIRECTORY",
		"GOMEMLIMIT", // set by crius's systemd unit
	}
	return slices.DeleteFunc(os.Environ(), func(e string) bool {
		name, _, _ := strings.Cut(e, "=")
		return slices.Contains(private, name) || strings.HasPrefix(name, "OTEL_") // may have tokens
	})
}

// closeOnExec keeps children from inheriting descriptors with which this
// process was started.
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
