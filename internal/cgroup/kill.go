package cgroup

import (
	"bytes"
	"context"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/backoff"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/poll"
)

// Kill ends every process in the cgroup path and below it, in any hierarchy,
// with SIGKILL, and returns when none is left, frozen or not. No process escapes
// by forking: v2 kills the whole tree at once; v1, and v2 before Linux 5.14,
// freeze it while it is killed. A single process is first killed without
// freezing: if it forks before it dies, the child is in the cgroup before its
// parent leaves it, and the next round, which freezes, finds it.
//
// Kill continues until ctx is done, which is fault.Timeout: a process in
// uninterruptible sleep cannot be killed. The root, and any cgroup that
// contains the caller, are refused.
func Kill(ctx context.Context, cgroup string) error {
	cgroup, err := clean(cgroup)
	if err != nil {
		return failed("kill cgroup", cgroup, err)
	}
	all, _, err := find()
	if err != nil {
		return failed("kill cgroup", cgroup, err)
	}
	for _, h := range all {
		if cgroup == "/" || within(h.own, cgroup) {
			return failed("kill cgroup", h.dir(cgroup), problem{fault.Invalid, "crius itself is in it"})
		}
	}
	unfrozen := 1
	for idle := backoff.New(time.Millisecond, 50*time.Millisecond); ; {
		pids, err := strike(ctx, all, cgroup, unfrozen)
		unfrozen = 0
		if err != nil {
			return failed("kill cgroup", cgroup, err)
		}
		if len(pids) == 0 {
			return nil
		}
		if !await(ctx, pids, idle.Next()) {
			return failed("kill cgroup", cgroup, problem{fault.Timeout, "still running: " + list(pids)})
		}
	}
}

// strike kills the present processes once, and returns them. If the kernel
// cannot kill a cgroup as a whole, strike freezes it meanwhile when there are
// more than unfrozen processes. Freezing the first cgroup of a node, and
// thawing the last, makes the kernel (since 6.1) patch its own code and
// interrupt every processor: too expensive for a single process.
func strike(ctx context.Context, all []hierarchy, cgroup string, unfrozen int) ([]int, error) {
	for _, h := range all {
		if h.v2() {
			_ = write(h.dir(cgroup)+"/cgroup.kill", "1") // since Linux 5.14
		}
	}
	pids, err := members(all, cgroup)
	if err != nil || len(pids) == 0 {
		return nil, err
	}
	defer thaw(all, cgroup)
	if len(pids) > unfrozen && freeze(ctx, all, cgroup) {
		if pids, err = members(all, cgroup); err != nil {
			return nil, err
		}
	}
	for _, pid := range pids {
		signal(all, cgroup, pid)
	}
	return pids, nil
}

// freeze freezes cgroup, on v1 and where v2 cannot kill it as a whole, and
// waits at most 50 ms: a process that cannot be frozen cannot fork either. It
// reports whether any cgroup was told to freeze.
func freeze(ctx context.Context, all []hierarchy, cgroup string) (told bool) {
	ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	for _, h := range all {
		f := h.freezer(cgroup)
		if f == nil || write(h.dir(cgroup)+"/"+f.file, f.freeze) != nil {
			continue
		}
		poll.Until(ctx, time.Millisecond, func() bool {
			state, err := os.ReadFile(h.dir(cgroup) + "/" + f.state)
			return err != nil || strings.Contains(string(state), f.frozen)
		})
		told = true
	}
	return told
}

// Thaw thaws the cgroup of a container, whoever has frozen it, and reports
// whether it was frozen: a frozen process does not see a signal. Cgroups above
// it, and those that the container has made below, stay as they are.
func Thaw(cgroup string) (thawed bool) {
	cgroup, err := clean(cgroup)
	if err != nil || cgroup == "/" {
		return false
	}
	all, _, err := find()
	if err != nil {
		return false
	}
	groups := []string{cgroup}
	if strings.HasSuffix(cgroup, ".scope") { // crun has its containers one below their scopes
		groups = append(groups, cgroup+"/container")
	}
	for _, h := range all {
		for _, group := range groups {
			thawed = h.thawOne(group) || thawed
		}
	}
	return thawed
}

// thawOne thaws a cgroup that has been frozen itself, and reports whether it did.
func (h hierarchy) thawOne(group string) bool {
	asked, file, thawed := "/cgroup.freeze", "/cgroup.freeze", "0"
	if h.has("freezer") {
		asked, file, thawed = "/freezer.self_freezing", "/freezer.state", "THAWED"
	}
	frozen, err := os.ReadFile(h.dir(group) + asked)
	return err == nil && string(frozen) == "1\n" && write(h.dir(group)+file, thawed) == nil
}

// thaw lets killed processes die, including those that were frozen earlier in a
// cgroup below.
func thaw(all []hierarchy, cgroup string) {
	for _, h := range all {
		f := h.freezer(cgroup)
		if f == nil {
			continue
		}
		_ = walk(h.dir(cgroup), nil, func(_ int, _ string, dir int) error {
			_ = writeAt(dir, f.file, f.thaw)
			return nil
		})
	}
}

// freezer says how a hierarchy freezes a cgroup.
type freezer struct {
	file, freeze, thaw string
	state, frozen      string // the file with the state, and its content when frozen
}

// freezer returns nil if the hierarchy cannot freeze the cgroup, or can kill it
// as a whole.
func (h hierarchy) freezer(cgroup string) *freezer {
	switch {
	case h.has("freezer"):
		return &freezer{"freezer.state", "FROZEN", "THAWED", "freezer.state", "FROZEN\n"}
	case h.v2() && unix.Access(h.dir(cgroup)+"/cgroup.kill", unix.F_OK) == unix.ENOENT: // before Linux 5.14
		return &freezer{"cgroup.freeze", "1", "0", "cgroup.events", "frozen 1\n"}
	}
	return nil
}

// signal kills pid if it is in cgroup: the process listed with that number may
// be gone and the pid reused.
func signal(all []hierarchy, cgroup string, pid int) {
	process, err := unix.PidfdOpen(pid, 0)
	if err == nil {
		defer unix.Close(process)
	}
	if !holds(all, cgroup, pid) {
		return
	}
	switch err {
	case nil:
		_ = unix.PidfdSendSignal(process, unix.SIGKILL, nil, 0)
	case unix.ENOSYS: // Linux before 5.3
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	release(all, cgroup, pid)
}

// release lets a killed process die although a cgroup above cgroup is frozen,
// which on v1 keeps SIGKILL from it: it moves the process to the root of the
// freezer, where the kernel thaws it. The cgroup above is not thawed: it may
// hold more, and somebody may want it frozen.
func release(all []hierarchy, cgroup string, pid int) {
	for _, h := range all {
		if !h.has("freezer") {
			continue
		}
		if above, err := os.ReadFile(h.dir(cgroup) + "/freezer.parent_freezing"); err == nil && string(above) == "1\n" {
			_ = write(h.dir("/")+"/cgroup.procs", strconv.Itoa(pid))
		}
	}
}

// Membership returns a function that reports whether a process is in a cgroup,
// or below it. A caller that acts on the process must open a pidfd of it first.
func Membership(cgroup string) (func(pid int) bool, error) {
	cgroup, err := clean(cgroup)
	if err != nil {
		return nil, failed("list processes of cgroup", cgroup, err)
	}
	all, _, err := find()
	if err != nil {
		return nil, failed("list processes of cgroup", cgroup, err)
	}
	return func(pid int) bool { return holds(all, cgroup, pid) }, nil
}

// holds asks any remaining thread if a process has no main thread, because v1
// hierarchies show such a process in the root. Otherwise the main thread
// decides: where Start lends a thread of crius to a cgroup, crius itself is not
// in it.
func holds(all []hierarchy, cgroup string, pid int) bool {
	process := "/proc/" + strconv.Itoa(pid)
	has := func(task string) bool {
		text, err := os.ReadFile(task + "/cgroup")
		return err == nil && belongs(memberships(string(text)), all, cgroup)
	}
	if has(process) {
		return true
	}
	if !withoutLeader(process) {
		return false
	}
	threads, _ := os.ReadDir(process + "/task")
	return slices.ContainsFunc(threads, func(e os.DirEntry) bool { return has(process + "/task/" + e.Name()) })
}

// withoutLeader reports whether the main thread of a process has ended: it is a
// zombie until all others have ended and the process has been reaped.
func withoutLeader(process string) bool {
	stat, _ := os.ReadFile(process + "/stat")
	end := bytes.LastIndexByte(stat, ')') // of the name, which may contain others
	return end >= 0 && bytes.HasPrefix(stat[end:], []byte(") Z"))
}

// belongs reports whether a process with these memberships is in cgroup.
func belongs(process []membership, all []hierarchy, cgroup string) bool {
	return slices.ContainsFunc(process, func(m membership) bool {
		return slices.ContainsFunc(all, func(h hierarchy) bool {
			if h.names != m.names {
				return false
			}
			at, ok := relative(m.own, h.root)
			return ok && within(at, cgroup)
		})
	})
}

// await waits until some of the processes have ended: at least one, and all of
// the first few if that happens soon. If it cannot tell it waits for idle. It
// returns false once ctx is done.
func await(ctx context.Context, pids []int, idle time.Duration) bool {
	const few = 64 // open files are scarce
	var ends []unix.PollFd
	for _, pid := range pids[:min(len(pids), few)] {
		if fd, err := unix.PidfdOpen(pid, 0); err == nil {
			defer unix.Close(fd)
			ends = append(ends, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
		}
	}
	until := time.Now().Add(100 * time.Millisecond)
	for len(ends) > 0 && time.Now().Before(until) && ctx.Err() == nil {
		n, err := unix.Poll(ends, 10)
		if err != nil && err != unix.EINTR {
			break
		}
		if n > 0 {
			ends = slices.DeleteFunc(ends, func(p unix.PollFd) bool { return p.Revents != 0 })
			idle = 0
		}
	}
	return poll.Pause(ctx, idle)
}

func list(pids []int) string {
	const most = 8
	var text string
	for i, pid := range pids {
		if i == most {
			return text + " and " + strconv.Itoa(len(pids)-most) + " more"
		}
		if i > 0 {
			text += " "
		}
		text += strconv.Itoa(pid)
	}
	return text
}
