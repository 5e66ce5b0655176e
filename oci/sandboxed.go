package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/proc"
	"github.com/crius-run/crius/oci/stdio"
)

// sandboxedTask is a container in a runtime sandbox that its runtime has made for
// another container, gVisor's or a virtual machine. Its pid is that of the
// runtime sandbox or of a stand-in, so everything goes through the runtime.
type sandboxedTask struct {
	*cliTask

	counted usageRate
}

// usageRate derives a rate from a container's CPU time.
type usageRate struct {
	mu   sync.Mutex
	last cgroup.Usage
}

// of returns u with the CPU rate since the previous call, and remembers u for the next
// one.
func (r *usageRate) of(u cgroup.Usage) cgroup.Usage {
	r.mu.Lock()
	defer r.mu.Unlock()
	if passed := u.Time.Sub(r.last.Time); r.last.CPU != nil && passed > 0 && u.CPU.Total >= r.last.CPU.Total {
		u.CPU.Rate = new(uint64)
		*u.CPU.Rate = uint64(float64(u.CPU.Total-r.last.CPU.Total) / passed.Seconds())
	}
	r.last = u
	return u
}

// monitored returns the monitor's spec with the settings for runtime sandboxes and the
// containers in them.
func (r *cli) monitored(a *Abilities, ref Ref, s conmon.Spec) conmon.Spec {
	s.Helpers = a.quirks.sandboxed
	if ref.Holder == "" {
		return s
	}
	if a.quirks.start {
		s.Start = r.argv(a, append(append([]string{}, a.quirks.log...), runtimeLog(ref), "start")...)
	}
	if a.quirks.wait != "" {
		s.Wait = r.argv(a, a.quirks.wait)
	}
	return s
}

func (t *sandboxedTask) Start(ctx context.Context) error {
	a, err := t.runtime.Probe(ctx)
	if err != nil {
		return err
	}
	if !a.quirks.start {
		return t.cliTask.Start(ctx)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, verbTimeout,
		fmt.Errorf("runtime %s did not start the container within %s: %w", t.runtime.name, verbTimeout, fault.Timeout))
	defer cancel()
	if err := t.client.Start(ctx); err != nil {
		return startFailed(t.ref.Dir, fmt.Errorf("%s: %w", t.runtime.name, describe(err, lastError(runtimeLog(t.ref)))))
	}
	return nil
}

// lastError returns the last error in a log of JSON objects.
func lastError(file string) string {
	last := ""
	for line := range strings.Lines(string(logTail(file, 64<<10))) {
		var entry struct{ Msg, Level string }
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Level == "error" {
			last = entry.Msg
		}
	}
	return last
}

// Signal ignores a container that is already gone. Kata's command line kills a container ten seconds
// after sending it SIGTERM, whatever the pod's grace period, so kata-shim gets that signal: it only passes
// it on. It does not pass on every other one.
func (t *sandboxedTask) Signal(ctx context.Context, sig unix.Signal) error {
	if a, err := t.runtime.Probe(ctx); err == nil && a.quirks.machine && sig == unix.SIGTERM {
		return t.watched.Signal(ctx, sig)
	}
	_, err := t.runtime.run(ctx, t.ref, nil, "kill", t.ref.ID, strconv.Itoa(int(sig)))
	if t.dead() {
		return nil
	}
	return err
}

// Kill: the runtime sends no signals to a container that was never started, or
// in a dead runtime sandbox. Both are deleted in the runtime, and the monitor, which
// has nothing to wait for, is notified.
func (t *sandboxedTask) Kill(ctx context.Context) error {
	if t.dead() {
		return nil
	}
	a, err := t.runtime.Probe(ctx)
	if err != nil {
		return err
	}
	reap := proc.ReapHelpers(a.quirks.helper, t.ref.Holder, t.ref.ID)
	_, err = t.runtime.run(ctx, t.ref, nil, "kill", "--all", t.ref.ID, strconv.Itoa(int(unix.SIGKILL)))
	if err == nil {
		reap()
	}
	if err == nil || t.dead() {
		return nil
	}
	slog.DebugContext(ctx, "container ignores SIGKILL, deleting it with the runtime", "container", t.ref.ID, "err", err)
	if err := t.runtime.forget(ctx, t.ref); err != nil {
		return err
	}
	return t.client.Release(ctx)
}

// Attach: if the runtime does not notify the processes in a runtime sandbox of a new
// terminal size, Attach sends SIGWINCH to all of them, because only the runtime
// knows whose terminal it is. Most processes without a terminal ignore it.
func (t *sandboxedTask) Attach(ctx context.Context, wanted conmon.Streams) (*stdio.Session, error) {
	a, err := t.runtime.Probe(ctx)
	if err != nil {
		return nil, err
	}
	if !a.quirks.tellSize {
		return t.cliTask.Attach(ctx, wanted)
	}
	return t.attach(ctx, wanted, func(ctx context.Context, size stdio.Size) error {
		if err := t.resize(ctx, size); err != nil {
			return err
		}
		_, err := t.runtime.run(ctx, t.ref, nil, "kill", "--all", t.ref.ID, strconv.Itoa(int(unix.SIGWINCH)))
		if t.dead() {
			return nil
		}
		return err
	})
}

// killSandboxed kills a command in a runtime sandbox and its descendants. Each is stopped
// before its children are listed, so that none is born behind our back.
func (t *cliTask) killSandboxed(ctx context.Context, pid int) {
	signal := func(pid int, sig unix.Signal) error {
		_, err := t.runtime.run(ctx, t.ref, nil, "kill", "--pid="+strconv.Itoa(pid), t.ref.ID, strconv.Itoa(int(sig)))
		return err
	}
	tree := []int{pid}
	var err error
	for stopped := 0; stopped < len(tree); {
		for ; stopped < len(tree); stopped++ {
			err = errors.Join(err, signal(tree[stopped], unix.SIGSTOP))
		}
		table, failed := t.runtime.run(ctx, t.ref, nil, "ps", t.ref.ID)
		err = errors.Join(err, failed)
		tree = withDescendants(tree, parentsIn(string(table)))
	}
	for _, pid := range tree {
		err = errors.Join(err, signal(pid, unix.SIGKILL))
	}
	if err != nil {
		slog.DebugContext(ctx, "cannot kill all processes of a command, some may have exited already", "container", t.ref.ID, "err", err)
	}
}

// withDescendants returns tree extended by all descendants of its processes.
func withDescendants(tree []int, parents map[int]int) []int {
	for i := 0; i < len(tree); i++ {
		for child, parent := range parents {
			if parent == tree[i] && !slices.Contains(tree, child) {
				tree = append(tree, child)
			}
		}
	}
	return tree
}

// parentsIn reads the parent of each process from a table with the columns PID
// and PPID.
func parentsIn(table string) map[int]int {
	parents := map[int]int{}
	heading, rows, _ := strings.Cut(table, "\n")
	columns := strings.Fields(heading)
	pid, ppid := slices.Index(columns, "PID"), slices.Index(columns, "PPID")
	if pid < 0 || ppid < 0 {
		return parents
	}
	for row := range strings.Lines(rows) {
		cells := strings.Fields(row)
		if len(cells) <= max(pid, ppid) {
			continue
		}
		child, err := strconv.Atoi(cells[pid])
		parent, failed := strconv.Atoi(cells[ppid])
		if err == nil && failed == nil && child != parent {
			parents[child] = parent
		}
	}
	return parents
}

// stats is the part of the runtime's answer to events --stats that crius reads.
type stats struct {
	Data struct {
		CPU struct {
			Usage struct{ Total uint64 }
		}
		Memory struct {
			Usage struct{ Usage, Limit uint64 }
		}
		PIDs struct{ Current uint64 }
	}
}

// Usage asks the runtime: the cgroup of a container in a runtime sandbox is empty.
func (t *sandboxedTask) Usage(ctx context.Context) (cgroup.Usage, error) {
	text, err := t.runtime.run(ctx, t.ref, nil, "events", "--stats", t.ref.ID)
	if err != nil {
		return cgroup.Usage{}, err
	}
	var s stats
	if err := json.Unmarshal(text, &s); err != nil {
		return cgroup.Usage{}, fmt.Errorf("%s events: %w", t.runtime.name, err)
	}
	used, tasks := s.Data.Memory.Usage.Usage, s.Data.PIDs.Current
	return t.counted.of(cgroup.Usage{
		Time:   time.Now(),
		CPU:    &cgroup.CPU{Total: s.Data.CPU.Usage.Total},
		Memory: &cgroup.Memory{Usage: used, WorkingSet: &used}, // the answer does not say how much could be reclaimed
		Tasks:  &tasks,
	}), nil
}

// Forward has the runtime connect a port of its runtime sandbox to a socket of the
// server.
func (t *cliTask) Forward(ctx context.Context, port uint16) (Stream, error) {
	a, err := t.runtime.Probe(ctx)
	if err != nil {
		return nil, err
	}
	if len(a.quirks.forward) == 0 {
		return nil, fmt.Errorf("runtime handler %s cannot forward ports into the sandbox; use the pod IP: %w", t.runtime.name, fault.Unimplemented)
	}
	c, err := stdio.NewConsole(ctx, t.ref.Dir)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	args := append(append([]string{}, a.quirks.forward...), c.Path, t.ref.ID, strconv.Itoa(int(port)))
	if _, err := t.runtime.run(ctx, t.ref, nil, args...); err != nil {
		return nil, fmt.Errorf("%w: %w", err, fault.Unavailable)
	}
	conn, err := c.Connection()
	if err != nil {
		return nil, err // rather than a Stream that holds a nil pointer
	}
	return conn, nil
}
