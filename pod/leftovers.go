package pod

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
)

// leftoverTime is how long crius waits for killed processes of a container.
const leftoverTime = 10 * time.Second

// endLeftovers kills the processes that remain after the container's first process ended, and
// notes in the exit those that do not die. The monitor did the same before it reported the
// exit, unless it is of an earlier release or was killed.
func (c *Container) endLeftovers(exit *conmon.Exit) {
	c.endSandboxed(exit.Signal == int32(unix.SIGKILL))
	if exit.Message != "" || c.ref.Cgroup == "" { // the message says what is left, or why everything was killed
		return
	}
	ctx := context.WithoutCancel(c.engine.background.Closing())
	left, err := cgroup.Occupied([]string{c.ref.Cgroup})
	if err != nil {
		slog.WarnContext(ctx, "cannot look for processes of an exited container", "container", c.ID, "err", err)
	}
	if len(left) == 0 {
		return
	}
	err = c.engine.deps.Trace.Do(ctx, "end leftover processes", c.ID, c.killLeftovers)
	if err != nil {
		exit.Message = fault.Text(err)
		slog.ErrorContext(ctx, "container has exited, but not all of its processes", "container", c.ID, "err", err)
	}
}

// endSandboxed kills the processes that remain inside a runtime sandbox, which only the runtime
// can do. If the first process was killed, that may have been its stand-in on this node alone.
func (c *Container) endSandboxed(killed bool) {
	if !c.mayLeaveProcesses() && !(killed && c.ref.Holder != "") {
		return
	}
	ctx := context.WithoutCancel(c.engine.background.Closing())
	if err := c.engine.deps.Trace.Do(ctx, "end leftover processes", c.ID, c.killSandboxed); err != nil {
		slog.WarnContext(ctx, "cannot kill processes that an exited container may have left in its sandbox", "container", c.ID, "err", err)
	}
}

// mayLeaveProcesses reports whether processes of the container may remain in its runtime sandbox.
// They cannot if the container has its own PID namespace, which ends with its first process.
func (c *Container) mayLeaveProcesses() bool {
	options := c.plan.Config.M.GetLinux().GetSecurityContext().GetNamespaceOptions()
	return c.ref.Holder != "" && options.GetPid() != cri.NamespaceMode_CONTAINER
}

func (c *Container) killSandboxed(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leftoverTime)
	defer cancel()
	return trace.Do(ctx, "kill leftover processes", func(ctx context.Context) error {
		return c.runtime.EndLeftovers(ctx, c.ref)
	})
}

// killLeftovers kills the container's cgroup and waits until it is empty. After leftoverTime
// the error is fault.Timeout.
func (c *Container) killLeftovers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leftoverTime)
	defer cancel()
	return trace.Do(ctx, "kill cgroup", func(ctx context.Context) error {
		if err := cgroup.Kill(ctx, c.ref.Cgroup); err != nil {
			return fmt.Errorf("kill leftover processes: %w", err)
		}
		return nil
	})
}
