package inherit

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// attribute is a thread attribute that children inherit.
type attribute struct {
	name  string
	reset func() error // on the calling thread; an error means that it is not reset
}

// attributes are ordered: the timer slack follows the scheduling policy.
func attributes() []attribute {
	return []attribute{
		{"scheduling policy and nice value", resetScheduling},
		{"CPU affinity", resetAffinity},
		{"I/O priority", resetIOPriority},
		{"timer slack", resetTimerSlack},
		{"memory policy", resetMemoryPolicy},
		{"personality", resetPersonality},
		{"signal mask", unblockSignals},
		{"core scheduling cookie", resetCookie},
		{"speculation control", resetSpeculation},
		{"secure bits", func() error { return unset(unix.PR_GET_SECUREBITS, unix.PR_SET_SECUREBITS) }},
		{"I/O flusher state", func() error { return unset(unix.PR_GET_IO_FLUSHER, unix.PR_SET_IO_FLUSHER) }},
		{"memory failure policy", resetMemoryFailure},
		{"audit session", resetAuditSession},
	}
}

// resetScheduling sets SCHED_OTHER, nice 0, no reset on fork and no utilization
// clamps. A real-time policy would also keep a thread out of v1 cgroups.
func resetScheduling() error {
	now, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		return nil //nolint:nilerr // the kernel has no way to tell, nor to change it
	}
	plain := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}
	if clamped := now.Util_max > 0 && (now.Util_min != 0 || now.Util_max != capacity); clamped {
		const reset = ^uint32(0)
		clamps := unix.SchedAttr{
			Size: unix.SizeofSchedAttr, Policy: now.Policy, Util_min: reset, Util_max: reset,
			Flags: unix.SCHED_FLAG_KEEP_ALL | unix.SCHED_FLAG_UTIL_CLAMP_MIN | unix.SCHED_FLAG_UTIL_CLAMP_MAX,
		}
		_ = unix.SchedSetAttr(0, &clamps, 0)
	}
	if err = unix.SchedSetAttr(0, &plain, 0); err == nil {
		return nil
	}
	if now.Policy == unix.SCHED_NORMAL && now.Nice == 0 && now.Flags&unix.SCHED_FLAG_RESET_ON_FORK == 0 {
		return nil
	}
	kept := plain
	kept.Nice = now.Nice // a higher priority needs CAP_SYS_NICE, another policy does not
	_ = unix.SchedSetAttr(0, &kept, 0)
	return fmt.Errorf("policy %d, nice %d: %w", now.Policy, now.Nice, err)
}

// capacity is the kernel's value for a whole CPU (SCHED_CAPACITY_SCALE).
const capacity = 1024

// resetAffinity requests all CPUs. The kernel grants those of the cpuset, now
// and when the process is moved to another one: since Linux 6.2 it remembers
// the request.
func resetAffinity() error {
	const most = 8192 // the largest NR_CPUS
	var all [most / 8]byte
	for i := range all {
		all[i] = 0xff
	}
	_, _, errno := unix.RawSyscall(unix.SYS_SCHED_SETAFFINITY, 0, unsafe.Sizeof(all), uintptr(unsafe.Pointer(&all)))
	return failed(errno)
}

func resetIOPriority() error {
	const thisThread, none = 1, 0 // IOPRIO_WHO_PROCESS, IOPRIO_CLASS_NONE: it follows the nice value
	_, _, errno := unix.RawSyscall(unix.SYS_IOPRIO_SET, thisThread, 0, none)
	return failed(errno)
}

func resetTimerSlack() error {
	const usual = 50_000 // ns, that of the kernel's init
	return unix.Prctl(unix.PR_SET_TIMERSLACK, usual, 0, 0, 0)
}

func resetMemoryPolicy() error {
	_, _, errno := unix.RawSyscall(unix.SYS_SET_MEMPOLICY, unix.MPOL_DEFAULT, 0, 0)
	return failed(errno)
}

func resetPersonality() error {
	const linux = 0 // PER_LINUX, with address space randomization
	_, _, errno := unix.RawSyscall(unix.SYS_PERSONALITY, linux, 0, 0)
	return failed(errno)
}

// unblockSignals is for processes that the thread starts. It does not let the
// thread receive signals that end the process, because handleIgnoredSignals handles
// those.
func unblockSignals() error {
	const setMask = 2 // SIG_SETMASK
	var none uint64
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&none)), 0, signals/8, 0, 0)
	return failed(errno)
}

// resetCookie leaves a core scheduling group by joining that of PID 1, which
// has none.
func resetCookie() error {
	const get, shareFrom, ofThread = 0, 3, 0 // PR_SCHED_CORE_GET, PR_SCHED_CORE_SHARE_FROM, PIDTYPE_PID
	var cookie uint64
	if err := unix.Prctl(unix.PR_SCHED_CORE, get, 0, ofThread, uintptr(unsafe.Pointer(&cookie))); err != nil || cookie == 0 {
		return nil //nolint:nilerr // no SMT, no cookies
	}
	return unix.Prctl(unix.PR_SCHED_CORE, shareFrom, 1, ofThread, 0)
}

// resetSpeculation allows the speculation features that were disabled, as on a
// machine without extra mitigations. Features that were disabled permanently
// stay disabled.
func resetSpeculation() error {
	const forGood = unix.PR_SPEC_FORCE_DISABLE
	var errs []error
	for name, which := range map[string]uintptr{"store bypass": unix.PR_SPEC_STORE_BYPASS, "indirect branches": unix.PR_SPEC_INDIRECT_BRANCH} {
		state, _, errno := unix.RawSyscall6(unix.SYS_PRCTL, unix.PR_GET_SPECULATION_CTRL, which, 0, 0, 0, 0)
		if errno != 0 || state&unix.PR_SPEC_PRCTL == 0 {
			continue
		}
		if state&forGood != 0 {
			errs = append(errs, fmt.Errorf("%s: disabled for good", name))
		} else if state&(unix.PR_SPEC_DISABLE|unix.PR_SPEC_DISABLE_NOEXEC) != 0 {
			errs = append(errs, unix.Prctl(unix.PR_SET_SPECULATION_CTRL, which, unix.PR_SPEC_ENABLE, 0, 0))
		}
	}
	return errors.Join(errs...)
}

func resetMemoryFailure() error {
	err := unix.Prctl(unix.PR_MCE_KILL, unix.PR_MCE_KILL_CLEAR, 0, 0, 0)
	if errors.Is(err, unix.EINVAL) { // a kernel without it
		err = nil
	}
	return err
}

// unset sets to 0 what one prctl reports and the other sets, unless it is 0
// already or the kernel does not have it.
func unset(get, set int) error {
	now, _, errno := unix.RawSyscall6(unix.SYS_PRCTL, uintptr(get), 0, 0, 0, 0, 0)
	if errno != 0 || now == 0 {
		return nil //nolint:nilerr // the kernel does not have it
	}
	return unix.Prctl(set, 0, 0, 0, 0)
}

// failed returns the error, or nil if the kernel does not have the call.
func failed(errno unix.Errno) error {
	if errno == 0 || errno == unix.ENOSYS {
		return nil
	}
	return errno
}

// resetAuditSession removes the login user from the thread: if the server was
// started from a shell, the audit trail would attribute what containers do to
// that user. If the kernel does not allow it (AUDIT_FEATURE_LOGINUID_IMMUTABLE)
// there is nothing to report: it is only a mark.
func resetAuditSession() error {
	_ = os.WriteFile("/proc/thread-self/loginuid", []byte("4294967295"), 0) // unset
	return nil
}
