package pod

import (
	"context"
	"errors"
	"fmt"
	"path"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// members looks at all containers.
func (v *verification) members(ctx context.Context) error {
	all := v.engine.containers.All()
	var living []storage.Rootfs
	for _, c := range all {
		if c.shouldLive() {
			living = append(living, c.roots()...)
		}
	}
	defects, err := v.engine.deps.Images.Verify(ctx, living)
	if err != nil {
		return fmt.Errorf("compare the image store: %w", err)
	}
	byRoot := v.sort(defects, true)
	var confirmed errgroup.Group // side by side: a monitor that hangs takes its time
	confirmed.SetLimit(recoverWidth)
	for _, c := range suspects(all, func(c *Container) bool { return len(c.problems(ctx, byRoot)) > 0 }) {
		confirmed.Go(func() error { return v.confirm(ctx, c) })
	}
	return errors.Join(confirmed.Wait(), ctx.Err())
}

// confirm looks again at a container, which nobody may change meanwhile.
func (v *verification) confirm(ctx context.Context, c *Container) error {
	if !c.life.TryLock() {
		return nil // a verb is at work on it
	}
	defer c.life.Unlock()
	c.settle()
	var byRoot map[string][]string
	if c.shouldLive() {
		defects, err := v.engine.deps.Images.Verify(ctx, c.roots())
		if err != nil {
			return fmt.Errorf("compare the image store: %w", err)
		}
		byRoot = v.sort(defects, false)
	}
	v.report.Add(ctx, "container "+c.id, c.problems(ctx, byRoot))
	return nil
}

// sort tells what is a root file system's from what is the store's own, which
// it keeps for later.
func (v *verification) sort(defects []storage.Defect, keep bool) map[string][]string {
	byRoot := map[string][]string{}
	for _, d := range defects {
		if d.Rootfs != "" {
			byRoot[d.Rootfs] = append(byRoot[d.Rootfs], d.Text)
		} else if keep {
			v.loose = append(v.loose, d)
		}
	}
	return byRoot
}

// shouldLive tells whether the container has a process, as far as is known.
func (c *Container) shouldLive() bool {
	now := c.now()
	if now.exit == nil && !now.gone && c.plan.BootID == c.engine.boot && now.Phase != records.Creating && now.Phase != records.Removing && now.Refused() == nil {
		_, err := conmon.ReadExit(c.ref.ExitFile)
		return err != nil // with the server down, that is where it is noted
	}
	return false
}

// settle waits until the server has come to terms with an exit, for which it
// kills what a lost monitor has left.
func (c *Container) settle() {
	if task := c.now().task; task == nil || !exited(task) {
		return
	}
	select {
	case <-c.exited:
	case <-time.After(answerTime):
	}
}

// problems are the ways in which the container is not what its record says.
// Roots has what is wrong with root file systems.
func (c *Container) problems(ctx context.Context, roots map[string][]string) []audit.Problem {
	now := c.now()
	if now.gone {
		return nil
	}
	var found []audit.Problem
	if _, err := c.engine.records.Containers.Get(c.id); err != nil {
		found = append(found, audit.Problem{Wrong: fmt.Sprintf("its record on disk is not usable: %v", err), Remedy: audit.Remedy{Text: "rewrite the record", Do: c.put}})
	}
	switch now.Phase {
	case records.Creating:
		return append(found, c.engine.unfinished("its creation"))
	case records.Removing:
		return append(found, c.engine.unfinished("its removal"))
	}
	_, onDisk := conmon.ReadExit(c.ref.ExitFile)
	if now.exit == nil && c.plan.BootID != c.engine.boot {
		if onDisk != nil {
			found = append(found, audit.Problem{Wrong: "the node was rebooted while it was running", Remedy: audit.Remedy{Text: "record this as its exit"}})
		}
		return found
	}
	if now.exit != nil {
		if onDisk != nil {
			found = append(found, audit.Problem{Wrong: fmt.Sprintf("its exit is not recorded: %v", onDisk), Remedy: audit.Remedy{Text: "record the exit again", Do: c.recordExit}})
		}
		return found
	}
	if now.Refused() != nil {
		return found
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	task, err := c.runtime.Load(ctx, c.ref)
	if err != nil {
		return append(found, audit.Problem{Wrong: err.Error(), Advice: "check its monitor (crius-conmon); if it hangs, kill it: crius then kills the container"})
	}
	if task != c.now().task {
		defer task.Close()
	}
	if exited(task) {
		return append(found, c.exitProblems(task)...)
	}
	return append(found, c.livingProblems(task, roots)...)
}

func (c *Container) recordExit(context.Context) error {
	return conmon.WriteExit(c.ref.ExitFile, *c.now().exit)
}

// exitProblems: the container is dead, as its monitor's silence has it, and the
// server has not noted that.
func (c *Container) exitProblems(task oci.Task) []audit.Problem {
	if _, err := task.Exit(); err == nil {
		return nil // it will, or the next one does
	}
	if known := c.now().task; known != nil && !exited(known) && !c.now().unreachable {
		return []audit.Problem{{Wrong: "its monitor can no longer be reached through its socket in " + c.ref.Dir,
			Advice: "restart the container before restarting crius: a restarted server treats the monitor as lost and kills the container"}}
	}
	return []audit.Problem{{Wrong: "its monitor died without recording the container's exit",
		Remedy: audit.Remedy{Text: "kill what is left of the container and record that as its exit"}}}
}

// livingProblems: what a container with a process has.
func (c *Container) livingProblems(task oci.Task, roots map[string][]string) []audit.Problem {
	const advice = "delete the pod or restart the container"
	var found []audit.Problem
	for _, root := range c.roots() {
		for _, text := range roots[root.ID] {
			found = append(found, audit.Problem{Wrong: text, Advice: advice})
		}
	}
	// What lives in a sandbox has its limits there.
	if !c.sandbox.plan.Sandboxed && lacksCgroup(c.plan.Cgroup) {
		select {
		case <-task.Exited(): // systemd has removed it, and the monitor has not said so yet
		case <-time.After(time.Second):
			found = append(found, audit.Problem{Wrong: "its cgroup " + c.plan.Cgroup + " is gone, and with it the container's limits", Advice: advice})
		}
	}
	if exited(task) {
		return nil
	}
	return found
}

// lacksCgroup tells whether a cgroup is gone from one that is there.
func lacksCgroup(name string) bool {
	if name == "" {
		return false
	}
	there, err := cgroup.Exists(name)
	above, errAbove := cgroup.Exists(path.Dir(name))
	return errors.Join(err, errAbove) == nil && !there && above
}
