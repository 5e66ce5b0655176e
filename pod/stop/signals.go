package stop

import (
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// noHandler is the reason why the init of a PID namespace does not notice a signal. While a
// process sleeps in sigwait, the kernel shows the signals that it waits for as not blocked.
const noHandler = "its first process is PID 1 of a PID namespace and had no handler for the signal when looked at: if it had none when the signal came, the kernel discarded it (pid_namespaces(7)); an init that waits for signals, such as tini, looks the same"

// discarded returns why a process would not notice a signal now, according to its
// /proc/PID/status; empty: it would, as far as can be told.
//
// The kernel discards signals that the init of a PID namespace neither handles nor blocks, so
// that it cannot be killed from inside (pid_namespaces(7)). A program that has not installed
// its handler yet is such an init, too.
func discarded(status string, signal unix.Signal) string {
	pids := strings.Fields(field(status, "NSpid"))
	switch isInit := len(pids) > 1 && pids[len(pids)-1] == "1"; {
	case among(status, "SigIgn", signal):
		return "its first process ignores the signal"
	case isInit && !among(status, "SigCgt", signal) && !among(status, "SigBlk", signal):
		return noHandler
	}
	return ""
}

// pending returns why a process has not received a signal that was sent, according to its
// /proc/PID/status; empty: it has, as far as can be told.
func pending(status string, signal unix.Signal) string {
	if among(status, "ShdPnd", signal) {
		return "its first process has not taken the signal, which is pending: it blocks the signal, or is stopped or hangs"
	}
	return ""
}

// among reports whether a signal is in one of the sets of a /proc/PID/status.
func among(status, set string, signal unix.Signal) bool {
	mask, err := strconv.ParseUint(field(status, set), 16, 64)
	return err == nil && mask>>(signal-1)&1 != 0
}

// field returns the value of a line of /proc/PID/status.
func field(status, name string) string {
	_, rest, _ := strings.Cut(status, "\n"+name+":\t")
	value, _, _ := strings.Cut(rest, "\n")
	return value
}
