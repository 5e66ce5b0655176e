package audit

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// containers checks all containers.
func (v *verification) containers(ctx context.Context) error {
	all := v.Node.Containers()
	var living []storage.Rootfs
	for _, c := range all {
		if v.shouldLive(c) {
			living = append(living, c.Roots...)
		}
	}
	defects, err := v.Images.Verify(ctx, living)
	if err != nil {
		return fmt.Errorf("compare the image store: %w", err)
	}
	byRoot := v.sort(defects, true)
	wrong := suspects(all, func(c *Container) bool { return len(v.containerProblems(ctx, c, byRoot)) > 0 })
	failed := make(chan error, len(wrong))
	sideBySide(wrong, func(c *Container) { failed <- v.confirm(ctx, c) })
	close(failed)
	for err := range failed {
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

// confirm checks a container again, while no verb changes it.
func (v *verification) confirm(ctx context.Context, c *Container) (err error) {
	c.WhileIdle(func() { err = v.confirmIdle(ctx, c) })
	return err
}

func (v *verification) confirmIdle(ctx context.Context, c *Container) error {
	c.settle()
	var byRoot map[string][]string
	if v.shouldLive(c) {
		defects, err := v.Images.Verify(ctx, c.Roots)
		if err != nil {
			return fmt.Errorf("compare the image store: %w", err)
		}
		byRoot = v.sort(defects, false)
	}
	v.report.Add(ctx, "container "+c.ID, v.containerProblems(ctx, c, byRoot))
	return nil
}

// sort returns the defects of root file systems, by their ids. With keep it puts those of the
// store itself aside for later.
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

// shouldLive reports whether the container should have a process, as far as is known.
func (a *Auditor) shouldLive(c *Container) bool {
	now := c.Now()
	if now.Exit == nil && !now.Gone && c.Plan.BootID == a.Boot && now.Phase != records.Creating && now.Phase != records.Removing && now.Refused() == nil {
		_, err := conmon.ReadExit(c.Ref.ExitFile)
		return err != nil // an exit while the server was down is noted only there
	}
	return false
}

// settle waits until the server has dealt with an exit: it kills what a lost monitor has left.
func (c *Container) settle() {
	if task := c.Now().Task; task == nil || !oci.Exited(task) {
		return
	}
	select {
	case <-c.Exited:
	case <-time.After(answerTime):
	}
}

// containerProblems returns the differences between the container and its record. Roots are the
// defects of root file systems, by their ids.
func (a *Auditor) containerProblems(ctx context.Context, c *Container, roots map[string][]string) []Problem {
	now := c.Now()
	if now.Gone {
		return nil
	}
	var found []Problem
	if _, err := a.Records.Containers.Get(c.ID); err != nil {
		found = append(found, Problem{Wrong: fmt.Sprintf("its record on disk is not usable: %v", err), Remedy: Remedy{Text: "rewrite the record", Do: c.Put}})
	}
	switch now.Phase {
	case records.Creating:
		return append(found, unfinished("its creation"))
	case records.Removing:
		return append(found, unfinished("its removal"))
	}
	_, onDisk := conmon.ReadExit(c.Ref.ExitFile)
	if now.Exit == nil && c.Plan.BootID != a.Boot {
		if onDisk != nil {
			found = append(found, Problem{Wrong: "the node was rebooted while it was running", Remedy: Remedy{Text: "record this as its exit"}})
		}
		return found
	}
	if now.Exit != nil {
		if onDisk != nil {
			found = append(found, Problem{Wrong: fmt.Sprintf("its exit is not recorded: %v", onDisk), Remedy: Remedy{Text: "record the exit again", Do: c.recordExit}})
		}
		return found
	}
	if now.Refused() != nil {
		return found
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	task, err := c.Runtime.Load(ctx, c.Ref)
	if err != nil {
		return append(found, Problem{Wrong: fault.Text(err), Advice: "check its monitor (crius-conmon); if it hangs, kill it: crius then kills the container"})
	}
	if task != c.Now().Task {
		defer task.Close()
	}
	if oci.Exited(task) {
		return append(found, c.exitProblems(task)...)
	}
	return append(found, c.livingProblems(ctx, task, roots)...)
}

func (c *Container) recordExit(context.Context) error {
	return conmon.WriteExit(c.Ref.ExitFile, *c.Now().Exit)
}

// exitProblems returns the problems of a container that is dead although the server has not
// noted that.
func (c *Container) exitProblems(task oci.Task) []Problem {
	if _, err := task.Exit(); err == nil {
		return nil // this server will note it, or the next one
	}
	if known := c.Now().Task; known != nil && !oci.Exited(known) && !c.Now().Unreachable {
		return []Problem{{Wrong: "its monitor can no longer be reached through its socket in " + c.Ref.Dir,
			Advice: "restart the container before restarting crius: a restarted server treats the monitor as lost and kills the container"}}
	}
	return []Problem{{Wrong: "its monitor died without recording the container's exit",
		Remedy: Remedy{Text: "kill what is left of the container and record that as its exit"}}}
}

// livingProblems returns the problems of a container that has a process.
func (c *Container) livingProblems(ctx context.Context, task oci.Task, roots map[string][]string) []Problem {
	const advice = "delete the pod or restart the container"
	var found []Problem
	for _, root := range c.Roots {
		for _, text := range roots[root.ID] {
			found = append(found, Problem{Wrong: text, Advice: advice})
		}
	}
	found = append(found, c.logProblems(ctx, task)...)
	// The limits of a sandboxed container are those of the runtime sandbox.
	if !c.Sandboxed && lacksCgroup(c.Plan.Cgroup) {
		select {
		case <-task.Exited(): // systemd removed it before the monitor reported the exit
		case <-time.After(time.Second):
			found = append(found, Problem{Wrong: "its cgroup " + c.Plan.Cgroup + " is gone, and with it the container's limits", Advice: advice})
		}
	}
	if oci.Exited(task) {
		return nil
	}
	return found
}

// logProblems returns why the container's log lacks what the container writes.
func (c *Container) logProblems(ctx context.Context, task oci.Task) []Problem {
	task.Logged(ctx) // all that the monitor has said before its answer is known then
	trouble, _ := task.LogTrouble()
	switch {
	case trouble.Reason == conmon.LogBlocked:
		return []Problem{{Wrong: "its output waits: " + trouble.Message, Advice: "make the file system of the log writable or free space on it; nothing is lost"}}
	case trouble.Reason == conmon.LogDetached:
		return []Problem{{Wrong: trouble.Message + ", and its output goes to a file that readers do not find", Advice: "have the kubelet reopen the log, which it does for a missing one, or restart the container"}}
	case c.Plan.LogPath == "":
		return nil
	}
	if _, err := os.Lstat(c.Plan.LogPath); errors.Is(err, fs.ErrNotExist) { // and nothing has been written since
		return []Problem{{Wrong: "its log " + c.Plan.LogPath + " is gone", Advice: "have the kubelet reopen the log, which it does for a missing one, or restart the container"}}
	}
	return nil
}

// lacksCgroup reports whether a cgroup is gone although its parent is there.
func lacksCgroup(name string) bool {
	if name == "" {
		return false
	}
	there, err := cgroup.Exists(name)
	above, errAbove := cgroup.Exists(path.Dir(name))
	return errors.Join(err, errAbove) == nil && !there && above
}
