package records

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/spec"
)

// Exit codes of processes that a signal has killed; shells give those of their children as their own.
const (
	codeSIGSYS  = 128 + int32(unix.SIGSYS)
	codeSIGKILL = 128 + int32(unix.SIGKILL)
)

// Explain adds to the message of an end what the plan knows about it, if it has none. A program of
// another architecture ends with an error without a word, if no emulator runs it, and so does one whose
// system call a seccomp profile forbids, be it the container's program or, before that is started, the runtime.
func (plan *ContainerPlan) Explain(code int32, started bool, message string) string {
	if code == 0 || message != "" {
		return message
	}
	profile, own := plan.profile()
	switch {
	case plan.Foreign != "":
		return fmt.Sprintf("the image is for %s and this node is %s: without an emulator (binfmt_misc) its programs cannot be run (exec format error)", plan.Foreign, runtime.GOARCH)
	case started && code == codeSIGSYS && profile != "":
		return fmt.Sprintf("killed by SIGSYS: the seccomp profile %s forbids a system call that it made; the audit log of the kernel has the number of the call (type=1326)", profile)
	case !started && own && code != codeSIGKILL:
		return "it ended before it was started: " + suspicion(profile)
	}
	return ""
}

// BlameProfile adds to the error of a runtime that the container's own seccomp profile may be its
// cause, if it can be: runtimes load the filter before they execute the container's program, and those
// that it stops say something else, or nothing.
func (plan *ContainerPlan) BlameProfile(err error) error {
	profile, own := plan.profile()
	if err == nil || !own || errors.Is(err, fault.Precondition) || errors.Is(err, fault.Invalid) || errors.Is(err, fault.Exhausted) {
		return err
	}
	text := strings.ToLower(err.Error())
	if !errors.Is(err, fault.Timeout) && !slices.ContainsFunc(filterSymptoms, func(words string) bool { return strings.Contains(text, words) }) {
		return err
	}
	return fmt.Errorf("%w; %s", err, suspicion(profile))
}

// filterSymptoms are what runc and crun say when a filter has stopped them, and what crius says of an init that
// is dead.
var filterSymptoms = []string{
	"operation not permitted", "function not implemented", // the usual errors of a filter
	"cannot start a container that has stopped", "cannot start an already running container", // runc 1.1.5, 1.5.3
	"read from the init process", // crun 1.8.1
	"connection reset by peer", ": eof", "the container ended while it was created",
}

func suspicion(profile string) string {
	return fmt.Sprintf("its seccomp profile %s may forbid a system call that the runtime makes before it executes the program; the audit log of the kernel has the number of the call (type=1326)", profile)
}

// profile returns the name of the container's seccomp profile, and whether it is one of the user's.
func (plan *ContainerPlan) profile() (name string, own bool) {
	return spec.SeccompName(plan.Config.M.GetLinux().GetSecurityContext())
}
