package cgroup

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/poll"
)

// Pause freezes the cgroup of a container and returns when all of its processes are frozen; Thaw
// resumes them. If ctx ends before, the cgroup is thawed again and the error is fault.Timeout. A
// cgroup that somebody else has frozen is fault.Precondition and stays as it is: whoever has done
// that does not expect its processes to run after a Thaw.
func Pause(ctx context.Context, cgroup string) error {
	cgroup, err := clean(cgroup)
	if err == nil && cgroup == "/" {
		err = problem{fault.Invalid, "the root cgroup cannot be frozen"}
	}
	if err != nil {
		return failed("freeze cgroup", cgroup, err)
	}
	all, _, err := find()
	if err != nil {
		return failed("freeze cgroup", cgroup, err)
	}
	h, f := pausable(all)
	if f == nil {
		return failed("freeze cgroup", cgroup, problem{fault.Unimplemented, "no hierarchy has a freezer"})
	}
	cgroup = ofContainer(h, cgroup)
	dir := h.dir(cgroup) + "/"
	if asked, err := os.ReadFile(dir + f.asked); err == nil && string(asked) == "1\n" {
		return failed("freeze cgroup", dir, problem{fault.Precondition, "it is frozen already: resume the container first"})
	}
	// On v1 nothing dies while it is frozen. A process that executes a program would wait for its other threads to
	// die, and never be frozen, and one that has been killed would die when the next has thawed it, such as criu.
	// All run again for a moment then.
	const moment = 5 * time.Millisecond
	for patience := 50 * time.Millisecond; ; patience = min(2*patience, time.Second) {
		if err := write(dir+f.file, f.freeze); err != nil {
			return failed("freeze cgroup", dir, err)
		}
		if f.freezes(ctx, h, cgroup, patience) {
			return nil
		}
		_ = write(dir+f.file, f.thaw)
		if !poll.Pause(ctx, moment) {
			return failed("freeze cgroup", dir, problem{fault.Timeout, "some processes did not freeze in time"})
		}
	}
}

// freezes waits until all processes of a cgroup are frozen, for as long as patience, and reports whether they are
// and none has been killed.
func (f *pauser) freezes(ctx context.Context, h hierarchy, cgroup string, patience time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return poll.Until(ctx, time.Millisecond, func() bool {
		state, err := os.ReadFile(h.dir(cgroup) + "/" + f.state) // on v1, reading it freezes what was forked meanwhile
		if err != nil || !strings.Contains(string(state), f.frozen) {
			return err != nil
		}
		pids, err := members([]hierarchy{h}, cgroup)
		if err == nil && slices.ContainsFunc(pids, dying) {
			cancel() // waiting does not help
			return false
		}
		return true
	})
}

// dying reports whether a process has been killed, or ends, and has not died yet.
func dying(pid int) bool {
	dir := "/proc/" + strconv.Itoa(pid)
	zombie, killed := threadIn(dir)
	if !zombie {
		return killed
	}
	// Its first thread has ended. If that ended the process, all others have been killed.
	threads, _ := filepath.Glob(dir + "/task/*")
	return slices.ContainsFunc(threads, func(thread string) bool {
		zombie, killed := threadIn(thread)
		return !zombie && killed
	})
}

// threadIn reports whether a thread has ended, and whether it, or its process, has been killed.
func threadIn(dir string) (zombie, killed bool) {
	status, err := os.ReadFile(dir + "/status")
	if err != nil {
		return false, false
	}
	for _, pending := range []string{"\nSigPnd:\t", "\nShdPnd:\t"} { // of the thread, of the process
		_, mask, _ := strings.Cut(string(status), pending)
		mask, _, _ = strings.Cut(mask, "\n")
		signals, err := strconv.ParseUint(mask, 16, 64)
		killed = killed || err == nil && signals&(1<<(unix.SIGKILL-1)) != 0
	}
	return strings.Contains(string(status), "\nState:\tZ"), killed
}

// pauser is a freezer with the file that says whether the cgroup itself is to be frozen.
type pauser struct {
	freezer
	asked string
}

// pausable returns the hierarchy that freezes containers: that of v1's freezer if there is one, as
// runtimes choose.
func pausable(all []hierarchy) (hierarchy, *pauser) {
	for _, h := range all {
		if h.has("freezer") {
			return h, &pauser{freezer{"freezer.state", "FROZEN", "THAWED", "freezer.state", "FROZEN\n"}, "freezer.self_freezing"}
		}
	}
	for _, h := range all {
		if h.v2() {
			return h, &pauser{freezer{"cgroup.freeze", "1", "0", "cgroup.events", "frozen 1\n"}, "cgroup.freeze"}
		}
	}
	return hierarchy{}, nil
}

// ofContainer returns the cgroup in which the runtime has the processes of a container: crun has
// them one below their systemd scope.
func ofContainer(h hierarchy, cgroup string) string {
	below := cgroup + "/container"
	if strings.HasSuffix(cgroup, ".scope") && unix.Access(h.dir(below), unix.F_OK) == nil {
		return below
	}
	return cgroup
}
