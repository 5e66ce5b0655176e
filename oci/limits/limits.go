// Package limits changes the resource limits of a live container: all requested
// changes, or none.
package limits

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
)

// Update is a change of a container's limits.
type Update struct {
	Resources   *specs.LinuxResources // all limits to be in force; nil fields stay
	Old         *specs.LinuxResources // what was in force before, for a rollback
	OOMScoreAdj *int                  // of every process; nil: unchanged
}

// Container is a container whose limits are changed.
type Container struct {
	ID        string
	Cgroup    string // its path below the cgroup mount
	Sandboxed bool   // it is in another container's runtime sandbox: its processes are not in the cgroup
}

// Update has apply, the runtime's update, set limits, and sets those that
// runtimes leave out. It does all of it or nothing: runtimes themselves stop in
// the middle when the kernel refuses a value. It is fault.Precondition if the
// container uses more memory than its new limit.
func (c Container) Update(ctx context.Context, u Update, apply func(context.Context, *specs.LinuxResources) error) error {
	u.leaveOutNoQuota()
	if err := c.makeRoom(u.Resources.Memory); err != nil {
		return err
	}
	old := c.limits(u)
	err := c.update(ctx, u, apply)
	if err != nil {
		err = c.explain(u, err)
		if u.Old != nil {
			// systemd has been told by some runtimes before the kernel refused,
			// and would bring the new values back at its next reload.
			if back := trace.Do(ctx, "runtime update", func(ctx context.Context) error { return c.apply(ctx, u.Old, apply) }); back != nil {
				slog.WarnContext(ctx, "runtime failed to restore the old limits", "container", c.ID, "err", back)
			}
		}
		err = errors.Join(err, trace.Call(ctx, "restore limits", func() error { return old.restore(c.Cgroup) }))
	}
	return err
}

// leaveOutNoQuota leaves out the CPU quota if there is none before or after the
// update: crun 1.8.1 fails to write that on cgroup v1.
func (u *Update) leaveOutNoQuota() {
	if !noQuota(u.Resources) || !noQuota(u.Old) {
		return
	}
	u.Resources, u.Old = withoutQuota(u.Resources), withoutQuota(u.Old)
}

// withoutQuota is r, of which CPU is not nil, with a CPU quota that stays.
func withoutQuota(r *specs.LinuxResources) *specs.LinuxResources {
	all, cpu := *r, *r.CPU
	cpu.Quota = nil
	all.CPU = &cpu
	return &all
}

func noQuota(r *specs.LinuxResources) bool {
	return r != nil && r.CPU != nil && r.CPU.Quota != nil && *r.CPU.Quota == -1
}

// update makes crius's own changes first, because they can be taken back
// without the runtime, which may have told systemd.
func (c Container) update(ctx context.Context, u Update, apply func(context.Context, *specs.LinuxResources) error) error {
	setHugepages := func() error { return c.setHugepages(u.Resources) }
	if err := trace.Call(ctx, "set huge page limits", setHugepages); err != nil {
		return err
	}
	if u.OOMScoreAdj != nil {
		score := strconv.Itoa(*u.OOMScoreAdj)
		set := func() error { return c.replaceOOMScores(score, func(old string) bool { return old != score }) }
		if err := trace.Call(ctx, "set oom_score_adj", set); err != nil {
			return err
		}
	}
	if err := trace.Do(ctx, "runtime update", func(ctx context.Context) error { return c.apply(ctx, u.Resources, apply) }); err != nil {
		return err
	}
	// Once more: on any update runc restores the huge page limits with which the
	// container was created.
	return trace.Call(ctx, "set huge page limits", setHugepages)
}

// apply calls runtimeUpdate. Where that fails to write "no CPU quota", as crun 1.8.1 does with
// cgroup v1, it writes that itself and has the runtime set the rest.
func (c Container) apply(ctx context.Context, r *specs.LinuxResources, runtimeUpdate func(context.Context, *specs.LinuxResources) error) error {
	err := runtimeUpdate(ctx, r)
	if err == nil || !noQuota(r) || cgroup.WriteFile(c.Cgroup, "cpu.cfs_quota_us", "-1") != nil {
		return err
	}
	return runtimeUpdate(ctx, withoutQuota(r))
}

// setHugepages writes the huge page limits, which no runtime's update does.
func (c Container) setHugepages(r *specs.LinuxResources) error {
	for _, limit := range r.HugepageLimits {
		value := strconv.FormatUint(limit.Limit, 10)
		err := cgroup.WriteFile(c.Cgroup, hugepageFile(limit.Pagesize, "limit_in_bytes"), value)
		if errors.Is(err, fault.NotFound) {
			err = cgroup.WriteFile(c.Cgroup, hugepageFile(limit.Pagesize, "max"), value)
		}
		if errors.Is(err, fault.NotFound) {
			return fmt.Errorf("cgroup %s has no limit for huge pages of %s: %w", c.Cgroup, limit.Pagesize, fault.Invalid)
		}
		if err != nil {
			return err
		}
		if err := c.setReserved(limit.Pagesize, value); err != nil {
			return err
		}
	}
	return nil
}

// setReserved changes the limit of reserved, not yet used pages if the runtime
// has set one, as current runc does.
func (c Container) setReserved(pageSize, value string) error {
	for _, suffix := range []string{"rsvd.limit_in_bytes", "rsvd.max"} {
		name := hugepageFile(pageSize, suffix)
		now, err := cgroup.ReadFile(c.Cgroup, name)
		if limit, parseErr := strconv.ParseUint(now, 10, 64); err != nil || parseErr != nil || limit >= unlimited {
			continue
		}
		if err := cgroup.WriteFile(c.Cgroup, name, value); err != nil {
			return err
		}
	}
	return nil
}

// unlimited is the lowest of cgroup v1's numbers that mean no limit.
const unlimited = 1 << 62

func hugepageFile(pageSize, suffix string) string { return "hugetlb." + pageSize + "." + suffix }

// scoreRounds is how often replaceOOMScores looks for processes with the old
// score.
const scoreRounds = 8

// replaceOOMScores gives a new score to the processes of the container that
// have an old one. A process forked meanwhile has its parent's score, old or
// new, so replaceOOMScores repeats until no process has an old one, or after
// scoreRounds: by then even a process that forks that fast has children with
// the new score.
func (c Container) replaceOOMScores(score string, old func(string) bool) error {
	isMember, err := cgroup.Membership(c.Cgroup)
	if err != nil {
		return err
	}
	for range scoreRounds {
		pids, err := cgroup.Procs(c.Cgroup)
		if err != nil {
			return err
		}
		changed := false
		for _, pid := range pids {
			now, err := os.ReadFile(oomScoreFile(pid))
			if err == nil && old(strings.TrimSpace(string(now))) {
				changed = true
				err = setOOMScore(pid, score, isMember)
			}
			if err != nil && !exited(err) {
				return fmt.Errorf("oom_score_adj of process %d: %w", pid, err)
			}
		}
		if !changed {
			break
		}
	}
	return nil
}

// setOOMScore sets the score of a process if mine accepts the process. It opens
// the process's file first, which pins the process: the pid may have been
// reused since it was listed.
func setOOMScore(pid int, score string, mine func(pid int) bool) error {
	f, err := os.OpenFile(oomScoreFile(pid), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if mine(pid) {
		_, err = f.WriteString(score)
	}
	return err
}

// LendOOMScore gives a process the oom_score_adj of the container's init if it
// can, and returns the old and the new value. Both are empty in a runtime sandbox, and
// if they do not differ or cannot be read.
func (c Container) LendOOMScore(init, pid int) (had, has string) {
	if c.Sandboxed {
		return "", "" // a helper only, the command is in the sandbox
	}
	score, err := os.ReadFile(oomScoreFile(init))
	before, gone := os.ReadFile(oomScoreFile(pid))
	if err != nil || gone != nil || bytes.Equal(before, score) {
		return "", ""
	}
	_ = os.WriteFile(oomScoreFile(pid), score, 0)
	return strings.TrimSpace(string(before)), strings.TrimSpace(string(score))
}

// ShareOOMScore does the same for an exec process and the processes that it has
// forked so far. With crun the process inherits the runtime's value, which is
// the container's unless the runtime was faster than LendOOMScore. runc sets
// the value with which the container was created, which an update may have
// changed since.
func (c Container) ShareOOMScore(init, pid int) {
	if had, has := c.LendOOMScore(init, pid); had != has {
		_ = c.replaceOOMScores(has, func(score string) bool { return score == had })
	}
}

func oomScoreFile(pid int) string { return "/proc/" + strconv.Itoa(pid) + "/oom_score_adj" }

// exited reports whether an error about a file in /proc means that the process
// is gone.
func exited(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) }

// makeRoom has the kernel reclaim page cache if the container uses more memory
// than its new limit, and refuses the update if that is not enough: cgroup v2
// would kill a process. On v1 the kernel does the same by itself.
func (c Container) makeRoom(memory *specs.LinuxMemory) error {
	if memory == nil || memory.Limit == nil || *memory.Limit <= 0 {
		return nil
	}
	used := func() int64 { return c.number("memory.current") } // 0 on v1
	over := used() - *memory.Limit
	if over <= 0 {
		return nil
	}
	// The write fails if less is reclaimed; before Linux 5.19, always.
	_ = cgroup.WriteFile(c.Cgroup, "memory.reclaim", strconv.FormatInt(over, 10))
	if n := used(); n > *memory.Limit {
		return tooMuchUsed(*memory.Limit, n)
	}
	return nil
}

// explain names the memory limit as the cause if that is what prevents the
// update. Anything else that the runtime could not do was refused by the
// kernel.
func (c Container) explain(u Update, err error) error {
	memory := u.Resources.Memory
	if memory != nil && memory.Limit != nil && *memory.Limit > 0 {
		if n := c.number("memory.usage_in_bytes"); n > *memory.Limit {
			return fmt.Errorf("%w: %w", tooMuchUsed(*memory.Limit, n), err)
		}
	}
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		return fmt.Errorf("%w: %w", err, fault.Precondition)
	}
	return err
}

func tooMuchUsed(limit, used int64) error {
	return fmt.Errorf("memory_limit_in_bytes %d is less than the %d bytes that the container uses: %w", limit, used, fault.Precondition)
}

// number returns the value of a cgroup file, 0 if there is none.
func (c Container) number(name string) int64 {
	text, err := cgroup.ReadFile(c.Cgroup, name)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(text, 10, 64)
	return n
}

// oldLimits holds the values before an update.
type oldLimits struct {
	files  map[string]string
	scores map[int]string
}

// limits reads everything that u may change. An unreadable file does not exist
// and will not change either.
func (c Container) limits(u Update) oldLimits {
	names := []string{
		"cpu.shares", "cpu.cfs_period_us", "cpu.cfs_quota_us", "cpuset.cpus", "cpuset.mems",
		"memory.limit_in_bytes", "memory.memsw.limit_in_bytes",
		"cpu.weight", "cpu.max", "memory.max", "memory.swap.max",
	}
	names = append(names, slices.Sorted(maps.Keys(u.Resources.Unified))...)
	for _, limit := range u.Resources.HugepageLimits {
		names = append(names, hugepageFile(limit.Pagesize, "limit_in_bytes"), hugepageFile(limit.Pagesize, "max"),
			hugepageFile(limit.Pagesize, "rsvd.limit_in_bytes"), hugepageFile(limit.Pagesize, "rsvd.max"))
	}
	old := oldLimits{files: map[string]string{}, scores: map[int]string{}}
	for _, name := range names {
		if value, err := cgroup.ReadFile(c.Cgroup, name); err == nil {
			old.files[name] = value
		}
	}
	if u.OOMScoreAdj != nil {
		pids, _ := cgroup.Procs(c.Cgroup)
		for _, pid := range pids {
			if value, err := os.ReadFile(oomScoreFile(pid)); err == nil {
				old.scores[pid] = string(value)
			}
		}
	}
	return old
}

// restore writes back the values that differ. Some values bound each other, so
// it tries those refused in the first round again in a second one.
func (old oldLimits) restore(path string) error {
	var errs []error
	for range 2 {
		errs = nil
		for name, value := range old.files {
			if now, err := cgroup.ReadFile(path, name); err == nil && now != value {
				errs = append(errs, cgroup.WriteFile(path, name, value))
			}
		}
	}
	if len(old.scores) > 0 {
		errs = append(errs, old.restoreScores(path))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("restore the old limits: %w", err)
	}
	return nil
}

func (old oldLimits) restoreScores(path string) error {
	isMember, err := cgroup.Membership(path)
	if err != nil {
		return err
	}
	var errs []error
	for pid, value := range old.scores {
		if err := setOOMScore(pid, strings.TrimSpace(value), isMember); err != nil && !exited(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
