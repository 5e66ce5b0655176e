package proc

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/eintr"
	"github.com/crius-run/crius/internal/poll"
)

// Reaper reaps orphans for which nothing waits.
type Reaper struct{}

// NewReaper makes this process the parent of orphaned descendants: runtimes
// leave it the commands of execs.
func NewReaper() (*Reaper, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become subreaper: %w", err)
	}
	return &Reaper{}, nil
}

// soon is how long the Reaper waits after a death, so that one look covers a burst of them.
const soon = 100 * time.Millisecond

// Run reaps until ctx ends. It leaves each zombie for a whole period to a
// goroutine that may wait for it, and reaps it only then. A process that a runtime
// has forked into a container, and that died without executing the command, it reaps
// soon, unless something claims it: until it is reaped the container cannot end, because
// its init waits for every process of its PID namespace, including zombies.
func (*Reaper) Run(ctx context.Context, period time.Duration, childDied <-chan os.Signal) {
	seen, early := map[int]bool{}, unstartedZombies{}
	for {
		if len(seen) == 0 {
			select {
			case <-ctx.Done():
				return
			case <-childDied:
			}
			early.reap(ctx)
		}
		// One scan covers a burst of deaths, and a zombie seen by the last scan has
		// had its period. The period is divided: if the machine stops for longer,
		// only one part of it is lost.
		const parts = 10
		for range parts {
			early.pause(ctx, period/parts, childDied)
			if ctx.Err() != nil {
				return
			}
		}
		seen = reapSeen(seen)
	}
}

// reapSeen reaps the zombies in before and returns the new ones.
func reapSeen(before map[int]bool) map[int]bool {
	zombies := map[int]bool{}
	for _, pid := range Children(os.Getpid()) {
		if !isZombie(pid) {
			continue // alive, or reaped by its owner
		}
		if !before[pid] {
			zombies[pid] = true
			continue
		}
		_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
	}
	return zombies
}

// unstartedZombies are copies of a runtime, as they come from one that failed or was killed, which
// may be claimed: by pid, with the last start that had begun when each was found.
type unstartedZombies map[int]int

// pause waits, and reaps what cannot wait as long.
func (z unstartedZombies) pause(ctx context.Context, d time.Duration, childDied <-chan os.Signal) {
	over := time.After(d)
	for {
		var again <-chan time.Time
		if len(z) > 0 {
			again = time.After(soon)
		}
		select {
		case <-ctx.Done():
			return
		case <-over:
			return
		case <-childDied:
		case <-again:
		}
		z.reap(ctx)
	}
}

// reap reaps those that nothing claims. After most deaths there is no zombie: its owner was quicker.
func (z unstartedZombies) reap(ctx context.Context) {
	if !poll.Pause(ctx, soon) {
		return
	}
	before := maps.Clone(z)
	clear(z)
	if !isZombie(anyChild) {
		return
	}
	for _, pid := range Children(os.Getpid()) {
		if !isZombie(pid) || !unstarted(pid) {
			continue
		}
		last, known := before[pid]
		if !known {
			last = children.lastStart()
		}
		if children.mayClaim(pid, last) {
			z[pid] = last
			continue
		}
		_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
	}
}

// anyChild stands for all children of this process.
const anyChild = -1

// isZombie reports whether a child has ended and has not been reaped.
func isZombie(pid int) bool {
	of := unix.P_PID
	if pid == anyChild {
		of = unix.P_ALL
	}
	var info unix.Siginfo
	err := unix.Waitid(of, pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	return err == nil && info.Signo == int32(unix.SIGCHLD)
}

// forkedNoExec is PF_FORKNOEXEC of linux/sched.h, among the flags of /proc/PID/stat.
const forkedNoExec = 0x40

// unstarted reports whether a process is an unexecuted copy of the process that
// forked it, in a PID namespace below the server's.
func unstarted(pid int) bool {
	if flags, _ := statField(pid, 9); flags&forkedNoExec == 0 {
		return false
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	_, rest, _ := bytes.Cut(status, []byte("\nNSpid:"))
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	return len(bytes.Fields(line)) > 1
}

// ReapHelpers finds the helper processes that a runtime has left beside a
// container and that became children of this process when the container's
// monitor was lost. They live until the container is killed: reap then waits
// for them, at most helperTime.
//
// It reads the arguments only of processes in the runtime sandbox's cgroup, which
// belong to the runtime. Other children of this process are exec processes of
// containers, which choose their arguments and can block the reader.
func ReapHelpers(word, sandbox, id string) (reap func()) {
	const helperTime = time.Second
	if word == "" {
		return func() {}
	}
	pids := slices.DeleteFunc(Children(os.Getpid()), func(pid int) bool {
		proc := filepath.Join("/proc", strconv.Itoa(pid))
		where, _ := os.ReadFile(proc + "/cgroup")
		if !strings.Contains(string(where), sandbox) {
			return true
		}
		line, _ := os.ReadFile(proc + "/cmdline")
		return !strings.Contains(string(line), "\x00"+word+"\x00") || !strings.Contains(string(line), id)
	})
	return func() {
		end := time.Now().Add(helperTime)
		for _, pid := range pids {
			fd, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				continue // it has been reaped elsewhere
			}
			_ = eintr.Retry(func() error {
				_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(max(time.Until(end), 0).Milliseconds()))
				return err
			})
			_ = unix.Close(fd)
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
		}
	}
}
