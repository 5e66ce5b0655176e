package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/stdio"
	"github.com/crius-run/crius/pod/session"
	"github.com/crius-run/crius/pod/view"
)

// Client is the client side of a session with a process in a container.
type Client = session.Client

// ExecSync runs a command in a running container until it ends; timeout 0 means no limit. A
// command that exceeds the timeout is killed, and the error is fault.Timeout.
func (e *Engine) ExecSync(ctx context.Context, id string, cmd []string, timeout time.Duration) (*oci.ExecResult, error) {
	c, err := e.runningContainer(id, "exec")
	if err != nil {
		return nil, err
	}
	kills, freezes := cgroup.OOMKills(c.plan.Cgroup), c.freezes.Load()
	var result *oci.ExecResult
	err = e.deps.Trace.Do(trace.CallersLimit(ctx), "exec", c.ID, func(ctx context.Context) (err error) {
		result, err = c.Now().task.Exec(ctx, cmd, timeout)
		return err
	})
	if errors.Is(err, fault.Timeout) && c.freezes.Load() != freezes { // a probe has not failed
		err = fmt.Errorf("the container was frozen by a checkpoint meanwhile: %s: %w", fault.Text(err), fault.Unavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("exec in container %s: %w", c.ID, overtaken(ctx, c.Now().task, err))
	}
	c.noteOOMOfExec(ctx, cmd[0], kills, result.ExitCode)
	return result, nil
}

// Exec runs a command in a running container and connects it with a client until it ends. If
// the client leaves, its end of the streams is closed, as when a terminal is hung up; the
// command may continue.
func (e *Engine) Exec(ctx context.Context, id string, cmd oci.Command, client Client) (exitCode int32, err error) {
	c, err := e.runningContainer(id, "exec")
	if err != nil {
		return 0, err
	}
	kills := cgroup.OOMKills(c.plan.Cgroup)
	// The traced operation ends when the command runs: how long it runs is up to its user.
	var s *stdio.Session
	if cmd.Terminal {
		cmd.Size = session.FirstSize(ctx, client)
		client.Size = cmd.Size
	}
	err = e.deps.Trace.Do(ctx, "exec", c.ID, func(ctx context.Context) (err error) {
		s, err = c.Now().task.Open(ctx, cmd)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	defer s.Close()
	if err := session.Exec(ctx, s, client, c.exited); err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	exitCode, err = s.ExitCode()
	if err == nil {
		c.noteOOMOfExec(ctx, cmd.Args[0], kills, exitCode)
	}
	return exitCode, err
}

// Attach connects a client with the standard streams of a running container until the container
// ends or the client leaves. If the container's input is to be used once (CRI:
// ContainerConfig.stdin_once), the end of the client's input also ends the container's, and the
// client stays until the container ends. Any other input, and that of a terminal, stays open
// and the session ends: kubectl waits for that (docs/decisions/0003-sessions.md).
func (e *Engine) Attach(ctx context.Context, id string, client Client) error {
	c, err := e.runningContainer(id, "attach")
	if err != nil {
		return err
	}
	s, err := c.Now().task.Attach(ctx, conmon.Streams{
		Stdin: client.Stdin != nil, Stdout: client.Stdout != nil, Stderr: client.Stderr != nil,
	})
	if err != nil {
		return fmt.Errorf("container %s: %w", c.ID, err)
	}
	defer s.Close()
	cfg := c.plan.Config.M
	if err := session.Attach(ctx, s, client, c.exited, session.Input{Once: cfg.GetStdinOnce() && !cfg.GetTty(), Terminal: cfg.GetTty()}); err != nil {
		return fmt.Errorf("attach to container %s: %w", c.ID, err)
	}
	return nil
}

func (e *Engine) runningContainer(id, what string) (*Container, error) {
	c, err := e.containers.Find(id)
	if err != nil {
		return nil, err
	}
	if state := c.View().State; state != cri.ContainerState_CONTAINER_RUNNING {
		return nil, fmt.Errorf("container %s is in state %s; %s requires a running container: %w", c.ID, state, what, fault.Precondition)
	}
	return c, cmp.Or(c.beingStarted(), c.beingCheckpointed())
}

// PortForward connects stream with a TCP port of the pod, at 127.0.0.1 or ::1, until both sides
// have ended. Closing stream ends only what is sent to the client, not what comes from it.
func (e *Engine) PortForward(ctx context.Context, id string, port uint16, stream io.ReadWriteCloser) error {
	s, err := e.sandboxes.Find(id)
	if err != nil {
		return err
	}
	v := s.View()
	if v.State != cri.PodSandboxState_SANDBOX_READY {
		return fmt.Errorf("pod %s is not ready: %w", s.ID, fault.Precondition)
	}
	ctx, cancel := until(ctx, s.ending)
	defer cancel()
	conn, err := s.dial(ctx, v, port)
	if err != nil {
		return fmt.Errorf("pod %s: %w", s.ID, causedBy(ctx, err))
	}
	defer conn.Close()
	if err := session.Forward(ctx, conn, stream); err != nil {
		return fmt.Errorf("pod %s, port %d: %w", s.ID, port, err)
	}
	return nil
}

// dial connects to a port inside the pod. Ready is a view of the pod while it was ready: a
// later view may have no network namespace, which would mean the node's.
func (s *Sandbox) dial(ctx context.Context, ready *view.Sandbox, port uint16) (oci.Stream, error) {
	if infra := s.Now().infra; infra != nil && s.plan.Sandboxed {
		conn, err := infra.Forward(ctx, port)
		if !errors.Is(err, fault.Unimplemented) {
			return conn, err
		}
		return network.DialAddress(ctx, ready.IPs, port)
	}
	return network.DialLoopback(ctx, ready.NetNS, port)
}
