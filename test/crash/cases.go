package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/wait"
)

// Actions at a point.
const (
	killServer  = "kill"    // SIGKILL of the server at the point
	killAmid    = "amid"    // SIGKILL of the server at a random instant of the step
	killMonitor = "monitor" // SIGKILL of the monitor that is not a bystander's
	fail        = "error"   // the step fails
	// Actions on a runtime or a CNI plugin, see test/failing. An NRI plugin dies,
	// too.
	dieBefore = "die"
	dieAfter  = "dieafter"
	dieAmid   = "cut"
)

// experiment is one case of the matrix.
type experiment struct {
	verb    verb
	handler string
	action  string
	point   string // a spot; the program and its verb: "runc create"; or the hook: "NRI CreateContainer"

	took time.Duration // of the step, or of the program, when it is not disturbed
}

func (e experiment) String() string {
	return fmt.Sprintf("VERB=%s HANDLER=%s ACTION=%s POINT='%s'", e.verb.name, e.handler, e.action, e.point)
}

// inHook reports whether the action happens while a hook of the NRI plugin
// runs.
func (e experiment) inHook() bool { return strings.HasPrefix(e.point, pluginPoint) }

// recording is what an undisturbed verb does.
type recording struct {
	mu    sync.Mutex
	spots []seen
}

type seen struct {
	spot
	at      time.Time
	monitor bool // there is a monitor to kill
}

// discover runs a verb and returns all possible experiments on it.
func (w *world) discover(ctx context.Context, v verb, handler string) ([]experiment, error) {
	s := w.stage(handler, changes(v)...)
	if v.prepare != nil {
		if err := v.prepare(s, ctx); err != nil {
			return nil, fmt.Errorf("%s with %s: prepare: %w", v.name, handler, err)
		}
	}
	calls, err := w.journal()
	if err != nil {
		return nil, err
	}
	hooks := w.plugin.met()
	var r recording
	w.gate.watch(func(at spot, _ string) string {
		monitor := len(w.monitors()) > 0
		r.mu.Lock()
		defer r.mu.Unlock()
		r.spots = append(r.spots, seen{at, time.Now(), monitor})
		return ""
	})
	err = v.run(s, ctx)
	w.gate.watch(nil)
	later, journalErr := w.journal()
	hooks = w.plugin.met()[len(hooks):]
	err = errors.Join(err, journalErr)
	if err == nil {
		err = v.settle(s, ctx)
	}
	if err == nil {
		err = w.wantAdjusted(ctx)
	}
	if err == nil {
		err = w.strike(ctx)
	}
	if err == nil {
		err = w.clean(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("%s with %s, left alone: %w", v.name, handler, err)
	}
	return slices.Concat(r.experiments(v, handler), programExperiments(v, handler, since(calls, later)), pluginExperiments(v, handler, hooks)), nil
}

func changes(v verb) []podChange {
	if v.change == nil {
		return nil
	}
	return []podChange{v.change}
}

func (r *recording) experiments(v verb, handler string) []experiment {
	var all []experiment
	for i, at := range r.spots {
		one := experiment{verb: v, handler: handler, point: at.String()}
		with := func(action string) {
			one.action = action
			all = append(all, one)
		}
		with(killServer)
		with(fail)
		if at.monitor {
			with(killMonitor)
		}
		if at.After {
			continue
		}
		end := at.spot
		end.After = true
		if j := slices.IndexFunc(r.spots[i:], func(s seen) bool { return s.spot == end }); j >= 0 {
			one.took = r.spots[i+j].at.Sub(at.at)
			with(killAmid)
		}
	}
	return all
}

// journal returns the calls of runtimes and plugins so far: "runc create".
func (w *world) journal() ([]string, error) {
	var all []string
	for _, program := range []string{"cni/bin", "crun", "runc"} {
		data, err := os.ReadFile(w.Path(program, "journal"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		for line := range strings.Lines(string(data)) {
			all = append(all, program+" "+strings.Fields(line)[0])
		}
	}
	return all, nil
}

// since returns the calls in later that are not in before.
func since(before, later []string) []string {
	count := map[string]int{}
	for _, call := range before {
		count[call]++
	}
	return slices.DeleteFunc(later, func(call string) bool { count[call]--; return count[call] >= 0 })
}

func programExperiments(v verb, handler string, calls []string) []experiment {
	var all []experiment
	slices.Sort(calls)
	for _, call := range slices.Compact(calls) {
		for _, action := range []string{dieBefore, dieAfter, dieAmid} {
			if action == dieAmid && call == "cni/bin DEL" {
				// The bridge plugin reads the addresses whose firewall rules it must
				// remove from the link that it removes first: that cannot be repeated.
				continue
			}
			all = append(all, experiment{verb: v, handler: handler, action: action, point: call, took: 20 * time.Millisecond})
		}
	}
	return all
}

// monitors returns those of containers other than the bystanders'.
func (w *world) monitors() []int {
	var pids []int
	for _, pid := range inventory.Processes(inventory.Scope{Cgroup: "/" + w.ID + "/monitors"}) {
		cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		bystander := slices.ContainsFunc(w.bystanders, func(b *bystander) bool { return strings.Contains(string(cmdline), b.id) })
		if err == nil && !bystander && strings.Contains(string(cmdline), "crius-conmon") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// try does one experiment. Its error is what crius did wrong.
func (w *world) try(ctx context.Context, e experiment) error {
	s := w.stage(e.handler, changes(e.verb)...)
	server := w.PID()
	before, err := inventory.Server(server)
	if err != nil {
		return err
	}
	if e.verb.prepare != nil {
		if err := e.verb.prepare(s, ctx); err != nil {
			return fmt.Errorf("prepare: %w", err)
		}
	}
	s.failed = e.action == fail
	s.containerKilled = e.action != killServer && e.action != killAmid && e.action != fail && !e.inHook()
	hit, err := w.disturb(ctx, e, func() { _ = e.verb.run(s, ctx) })
	if err != nil {
		return err
	}
	if !hit {
		return errors.New("the point was not reached")
	}
	if w.PID() == 0 {
		if err := w.Start(ctx); err != nil {
			return fmt.Errorf("the server does not start again: %w", err)
		}
	}
	if err := w.plugin.await(ctx); err != nil {
		return err
	}
	if err := e.verb.settle(s, ctx); err != nil {
		return err
	}
	if err := w.wantAdjusted(ctx); err != nil {
		return err
	}
	for _, b := range w.bystanders {
		if err := b.check(ctx); err != nil {
			return err
		}
	}
	if err := w.strike(ctx); err != nil {
		return fmt.Errorf("take down: %w", err)
	}
	if err := w.clean(ctx); err != nil || w.PID() != server {
		return err
	}
	return w.sameDescriptors(ctx, before)
}

var errDescriptors = errors.New("the server has more file descriptors than before")

// sameDescriptors waits until a server that did not die has no more file
// descriptors than before.
func (w *world) sameDescriptors(ctx context.Context, before inventory.Load) error {
	var now inventory.Load
	var err error
	if !wait.Until(ctx, func() bool {
		now, err = inventory.Server(w.PID())
		return err != nil || now.Total() <= before.Total()
	}) {
		return fmt.Errorf("%w: %d before, %d after\nbefore: %v\n after: %v", errDescriptors, before.Total(), now.Total(), before.FDs, now.FDs)
	}
	return err
}

// disturb runs the verb with the experiment's action, and reports whether that
// happened.
func (w *world) disturb(ctx context.Context, e experiment, run func()) (hit bool, err error) {
	switch {
	case e.inHook():
		return w.disturbHook(ctx, e, run)
	case slices.Contains([]string{dieBefore, dieAfter, dieAmid}, e.action):
		return w.disturbProgram(e, run)
	}
	var group sync.WaitGroup
	var mu sync.Mutex
	w.gate.watch(func(at spot, _ string) string {
		if at.String() != e.point {
			return ""
		}
		mu.Lock()
		defer mu.Unlock()
		hit = true
		switch e.action {
		case fail:
			return "an error for a test"
		case killMonitor:
			for _, pid := range w.monitors() {
				if killErr := unix.Kill(pid, unix.SIGKILL); killErr != nil && killErr != unix.ESRCH {
					err = errors.Join(err, killErr)
				}
			}
		case killServer:
			err = errors.Join(err, w.Kill())
		case killAmid:
			instant := time.Duration(rand.Int64N(int64(e.took) + 1))
			group.Go(func() {
				time.Sleep(instant)
				killErr := w.Kill()
				mu.Lock()
				defer mu.Unlock()
				err = errors.Join(err, killErr)
			})
		}
		return ""
	})
	run()
	wait.Until(ctx, func() bool { // a stop continues when the container has ended
		mu.Lock()
		defer mu.Unlock()
		return hit
	})
	w.gate.watch(nil)
	group.Wait()
	mu.Lock()
	defer mu.Unlock()
	return hit, err
}

// disturbProgram ends a runtime or a plugin at its next call of a verb.
func (w *world) disturbProgram(e experiment, run func()) (hit bool, err error) {
	program, verb, _ := strings.Cut(e.point, " ")
	words := "once " + e.action
	if e.action == dieAmid {
		words += " " + time.Duration(rand.Int64N(int64(e.took))).String()
	}
	file := w.Path(program, "faults", verb)
	if err := os.WriteFile(file, []byte(words), 0o644); err != nil {
		return false, err
	}
	run()
	err = os.Remove(file) // the first call removes it
	if errors.Is(err, os.ErrNotExist) {
		return true, nil
	}
	return false, err
}
