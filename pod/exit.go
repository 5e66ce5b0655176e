package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/records"
)

// watch waits for the exit of the container and publishes it.
func (c *Container) watch() { c.engine.background.Insist("watch container "+c.ID, c.awaitExit) }

func (c *Container) awaitExit() {
	select {
	case <-c.exited:
		return
	default:
	}
	if !c.awaitEnd(c.Now().task) {
		return
	}
	exit, err := c.Now().task.Exit()
	switch {
	case err != nil:
		exit = c.lost(err)
	case oci.NeverStarted(c.Now().task):
		c.recordExit(context.WithoutCancel(c.engine.background.Closing()), exit)
	}
	if known, err := conmon.ReadExit(c.ref.ExitFile); exit.OOMKills > 0 && err == nil {
		exit.OOMSeen = known.OOMSeen // which the monitor writes down, and does not report
	}
	c.endLeftovers(&exit)
	if !c.stop.Asked() {
		c.keep()
	}
	c.showExit(exit)
	if c.View().Reason == "OOMKilled" {
		c.engine.counters.oomKilled.Add(1)
	}
	c.Tell() // before those who wait for the exit end or remove the pod
	close(c.exited)
	defer c.shorten() // last, because plugins are shown the whole spec
	defer c.nri.Stopped(c.engine.background.Closing())
	slog.Info("container exited", "container", c.ID, "pod", c.sandbox.ID, "code", exit.Code, "oomkills", exit.OOMKills)
}

// awaitEnd returns when the container has exited, or false when the server ends. Meanwhile it
// notes the troubles of the log.
func (c *Container) awaitEnd(task oci.Task) bool {
	for {
		trouble, changed := task.LogTrouble()
		c.noteLog(trouble)
		select {
		case <-task.Exited():
			return true
		case <-c.engine.background.Closing().Done():
			return false
		case <-changed:
		}
	}
}

// noteOOMKills puts on record how many processes the OOM killer has killed before crius kills the
// container: they are not the reason for its end. If its first process is dead already, one of
// them may be. If the record cannot be written, only the next server takes them for the reason.
func (c *Container) noteOOMKills(ctx context.Context) {
	if processes, err := conmon.ReadProcesses(c.ref.Dir); err == nil && !conmon.Alive(processes.Container) {
		return
	}
	kills := cgroup.OOMKills(c.plan.Cgroup)
	if kills == 0 {
		return
	}
	c.Change(func(now *liveContainer) { now.OOMKills = kills })
	if err := c.Put(ctx); err != nil {
		slog.WarnContext(ctx, "earlier OOM kills not recorded, continuing", "container", c.ID, "err", err)
	}
}

// noteOOMOfExec puts on record that a command of an exec has ended with this code, if it is that of a
// process which the OOM killer has ended, and the killer's count has risen since the command began,
// when it was before: the message of the container's end tells of it. That shows the program and not
// its arguments, which may be secrets. Errors are logged and otherwise ignored.
func (c *Container) noteOOMOfExec(ctx context.Context, program string, before uint64, code int32) {
	if code != codeKilled || c.Now().exit != nil {
		return
	}
	kills := cgroup.OOMKills(c.plan.Cgroup)
	if kills <= before {
		return
	}
	exec := &records.OOMExec{Kills: kills, At: time.Now(), Command: fmt.Sprintf("%.60s", strings.ToValidUTF8(filepath.Base(program), "?"))}
	c.Change(func(now *liveContainer) { now.OOMExec = exec })
	c.engine.background.Go("record OOM kill of an exec", func() { // a verb may keep the container for long
		ctx, cancel := undoContext(ctx)
		defer cancel()
		if err := c.Finish(ctx, c.Put); err != nil {
			slog.WarnContext(ctx, "OOM kill during an exec not recorded, continuing", "container", c.ID, "err", err)
		}
	})
}

// keep syncs the records to the disk before an exit that nobody asked for is reported: after a
// power cut, a job that has succeeded must not run again. Only the records of short-lived
// containers are not on the disk by then.
func (c *Container) keep() {
	err := errors.Join(c.sandbox.Sync(), c.Sync())
	if err != nil {
		slog.Warn("cannot sync the records of an exited container", "container", c.ID, "err", err)
	}
}

// setExit publishes the exit of a container that exited before this server started.
func (c *Container) setExit(exit conmon.Exit) {
	c.showExit(exit)
	close(c.exited)
	c.engine.background.Go("shorten bundle "+c.ID, c.shorten) // that of an earlier release may be long
}

// showExit makes the exit visible to readers.
func (c *Container) showExit(exit conmon.Exit) {
	c.restoreCPUs() // before the next container gets its CPUs
	c.Change(func(now *liveContainer) { now.exit = &exit })
	c.Publish()
	c.meter.Close()
}

// Codes of exits that no monitor reported.
const (
	codeKilled  = 137 // crius killed it
	codeUnknown = 255 // it was gone after a reboot
)

// lost ends a container whose monitor is gone. Without the monitor its output goes nowhere and
// its exit cannot be seen, so the server kills it and writes the exit.
func (c *Container) lost(cause error) conmon.Exit {
	ctx, cancel := undoContext(c.engine.background.Closing())
	defer cancel()
	if exit, err := conmon.ReadExit(c.ref.ExitFile); err == nil { // it could not be read a moment ago
		return exit
	}
	exit := conmon.Exit{Code: codeKilled, FinishedAt: time.Now(), Message: fmt.Sprintf("killed because the container's monitor was lost (%v)", cause)}
	c.engine.counters.monitorsLost.Add(1)
	slog.ErrorContext(ctx, "monitor lost, killing its container", "container", c.ID, "err", cause)
	_ = c.engine.deps.Trace.Do(ctx, "end lost container", c.ID, func(ctx context.Context) error {
		if err := trace.Do(ctx, "send SIGKILL", c.Now().task.Kill); err != nil {
			slog.ErrorContext(ctx, "container whose monitor was lost not dead after SIGKILL", "container", c.ID, "err", err)
		}
		c.recordExit(ctx, exit)
		return nil
	})
	return exit
}

// recordExit writes the exit file of a container without a monitor, for the next server. It
// never replaces an exit. On a full disk it is retried until the container is removed; this
// server knows the exit meanwhile.
func (c *Container) recordExit(ctx context.Context, exit conmon.Exit) {
	record := func() error {
		_, err := conmon.ReadExit(c.ref.ExitFile)
		if err == nil || fault.Scarce(err) {
			return err
		}
		return conmon.WriteExit(c.ref.ExitFile, exit)
	}
	err := trace.Call(ctx, "write exit file", record)
	if err == nil {
		return
	}
	slog.ErrorContext(ctx, "container exit not recorded, retrying", "container", c.ID, "err", err)
	c.engine.cleanups.Add("exit of "+c.ID, func(context.Context) error {
		if c.Now().Phase == records.Removing {
			return nil
		}
		return record()
	})
}

// reloadDead recovers a container of an earlier boot whose exit is unknown.
func (c *Container) reloadDead(ctx context.Context, unknown error) {
	exit := conmon.Exit{Code: codeUnknown, FinishedAt: time.Now(), Message: "the node was rebooted while the container was running"}
	if !errors.Is(unknown, fault.NotFound) { // a damaged file is no reason to forget the container
		exit.Message = "the node was rebooted, and the record of the container's exit was damaged: " + unknown.Error()
		slog.ErrorContext(ctx, "cannot read a container's exit record, exit code unknown", "container", c.ID, "err", unknown)
	}
	c.recordExit(ctx, exit)
	c.setTask(oci.Dead(exit), false)
	c.setExit(exit)
}
