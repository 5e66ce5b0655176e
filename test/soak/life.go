package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// life is a pod from its beginning to its end.
type life struct {
	h          *soakNode
	handler    string
	config     *cri.PodSandboxConfig
	id         string
	containers []*soakContainer
}

// soakContainer is a container of a life.
type soakContainer struct {
	id     string
	config *cri.ContainerConfig
}

func (h *soakNode) newLife(handler string) *life {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pods++
	return &life{h: h, handler: handler, config: kubelet.Pod(fmt.Sprintf("p%d", h.pods), kubelet.LogsBelow(h.Path("logs")))}
}

// programs are what containers do, and the code with which they end, -1 if they do
// not end by themselves.
var programs = []struct {
	line string
	code int32
}{
	{"sleep", -1},
	{"tcp :8080 echo ; sleep", -1},
	{"ignore TERM ; lines 100000 1ms", -1},
	{"alloc 5 ; fork 3 sleep ; sleep", -1},
	{"exit 0", 0},
	{"lines 500 ; exit 3", 3},
	{"fork 2 sleep ; exit 4", 4},
}

// live runs one life, and records its problems.
func (h *soakNode) live(ctx context.Context) {
	l := h.newLife(h.handlers[h.n(len(h.handlers))])
	if err := errors.Join(l.live(ctx), l.end(ctx)); err != nil && ctx.Err() == nil {
		h.problem(fmt.Errorf("pod %s (%s) %.12s: %w", l.config.Metadata.Name, l.handler, l.id, err))
	}
}

func (l *life) live(ctx context.Context) error {
	h := l.h
	ref := images.Probe
	if variant := h.n(2 * variants); variant < variants {
		var err error
		if ref, err = h.pullImage(ctx, variant); err != nil {
			return err
		}
	}
	if err := l.begin(ctx); err != nil {
		return err
	}
	for range 1 + h.n(2) {
		program := programs[h.n(len(programs))]
		for range 1 + h.n(3) { // it is restarted
			// Containers of a pod share its ports.
			err := l.start(ctx, ref, strings.Replace(program.line, ":8080", fmt.Sprintf(":%d", 8080+len(l.containers)), 1))
			if status.Code(errors.Unwrap(err)) == codes.NotFound && ref != images.Probe {
				return nil // another life has removed the image
			}
			if err != nil {
				return err
			}
			c := l.containers[len(l.containers)-1]
			if program.code < 0 {
				for range h.n(5) {
					l.request(ctx, c)
				}
				break
			}
			if err := l.ends(ctx, c, program.code); err != nil {
				return err
			}
		}
	}
	if h.n(4) == 0 {
		// An image in use stays.
		if err := h.removeImage(ctx, h.n(variants)); err != nil && status.Code(errors.Unwrap(err)) != codes.FailedPrecondition {
			return err
		}
	}
	return nil
}

func (l *life) begin(ctx context.Context) error {
	l.h.note(func(t *tally) { t.pods++ })
	return l.h.call(ctx, "RunPodSandbox", func(ctx context.Context) error {
		resp, err := l.h.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: l.config, RuntimeHandler: l.handler})
		if err == nil {
			l.id = resp.PodSandboxId
		}
		return err
	})
}

// start creates and starts a container.
func (l *life) start(ctx context.Context, ref, line string) error {
	l.h.note(func(t *tally) { t.containers++ })
	c := &soakContainer{config: kubelet.Container(fmt.Sprintf("c%d", len(l.containers)), ref, scene.Steps(line))}
	if err := l.h.call(ctx, "CreateContainer", func(ctx context.Context) error {
		resp, err := l.h.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: l.id, Config: c.config, SandboxConfig: l.config})
		if err == nil {
			c.id = resp.ContainerId
		}
		return err
	}); err != nil {
		return err
	}
	l.containers = append(l.containers, c)
	return l.h.call(ctx, "StartContainer", func(ctx context.Context) error {
		_, err := l.h.Runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.id})
		if status.Code(err) == codes.FailedPrecondition && l.h.shaken { // the answer to an earlier call may be lost
			var s *cri.ContainerStatus
			statusErr := l.h.call(ctx, "ContainerStatus", func(ctx context.Context) (err error) { s, err = l.status(ctx, c); return err })
			if statusErr == nil && s.State != cri.ContainerState_CONTAINER_CREATED {
				return nil
			}
		}
		return err
	})
}

func (l *life) status(ctx context.Context, c *soakContainer) (*cri.ContainerStatus, error) {
	resp, err := l.h.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.id})
	return resp.GetStatus(), err
}

// ends waits for a container's end and its code.
func (l *life) ends(ctx context.Context, c *soakContainer, code int32) error {
	var s *cri.ContainerStatus
	var err error
	wait.Until(ctx, func() bool {
		err = l.h.call(ctx, "ContainerStatus", func(ctx context.Context) (err error) { s, err = l.status(ctx, c); return err })
		return err != nil || s.State == cri.ContainerState_CONTAINER_EXITED
	})
	if err == nil && (s.State != cri.ContainerState_CONTAINER_EXITED || s.ExitCode != code) {
		err = fmt.Errorf("container %.12s is %v with code %d (%s %s), want %d", c.id, s.State, s.ExitCode, s.Reason, s.Message, code)
	}
	return err
}

// request sends a request to a running container. The answer is checked; a session
// that breaks because the server was stopped is not.
func (l *life) request(ctx context.Context, c *soakContainer) {
	requests := []func(context.Context, *soakContainer) error{l.probe, l.probe, l.probe, l.hang, l.fail, l.converse, l.attach, l.forward, l.resize, l.measure}
	l.h.note(func(t *tally) { t.requests++ })
	err := requests[l.h.n(len(requests))](ctx, c)
	if err != nil && ctx.Err() == nil {
		l.h.problem(fmt.Errorf("container %.12s of pod %s (%s), %q: %w", c.id, l.config.Metadata.Name, l.handler, c.config.Args, err))
	}
}

func (l *life) exec(ctx context.Context, c *soakContainer, seconds int64, command ...string) (resp *cri.ExecSyncResponse, err error) {
	err = l.h.call(ctx, "ExecSync", func(ctx context.Context) (err error) {
		resp, err = l.h.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: c.id, Cmd: command, Timeout: seconds})
		return err
	})
	return resp, err
}

func (l *life) probe(ctx context.Context, c *soakContainer) error {
	resp, err := l.exec(ctx, c, scene.LimitSeconds, "/probe", "echo", "alive")
	if err == nil && (resp.ExitCode != 0 || string(resp.Stdout) != "alive\n") {
		err = fmt.Errorf("ExecSync: code %d, %q, %q", resp.ExitCode, resp.Stdout, resp.Stderr)
	}
	return err
}

// hang is a probe that exceeds its time limit.
func (l *life) hang(ctx context.Context, c *soakContainer) error {
	command := []string{"/probe", "sleep"}
	if tools.KillsChildren(l.handler) {
		command = []string{"/probe", "fork", "2", "sleep", ";", "sleep"}
	}
	_, err := l.exec(ctx, c, 1, command...)
	if status.Code(errors.Unwrap(err)) == codes.DeadlineExceeded {
		return nil
	}
	return fmt.Errorf("a command that hangs ends with %v", err)
}

func (l *life) fail(ctx context.Context, c *soakContainer) error {
	resp, err := l.exec(ctx, c, scene.LimitSeconds, "/there/is/none")
	if err == nil && resp.ExitCode == 0 {
		return errors.New("a missing program ends with code 0")
	}
	return nil // reported by an error or a code
}

// converse is an exec with all streams.
func (l *life) converse(ctx context.Context, c *soakContainer) error {
	resp, err := l.h.Runtime().Exec(ctx, &cri.ExecRequest{ContainerId: c.id, Cmd: []string{"/probe", "until", "enough"}, Stdin: true, Stdout: true, Stderr: true})
	if err != nil {
		return l.broken(fmt.Errorf("exec: %w", err))
	}
	s := l.streams().Open(ctx, resp.Url, kubelet.Wants{Stdin: true, Stdout: true, Stderr: true})
	defer s.Leave()
	if err := s.Type("hello\nenough\n"); err != nil {
		return l.broken(err)
	}
	if err := s.Wait(wait.Limit); err != nil || s.Stdout.String() != "hello\nenough\n" {
		return l.broken(fmt.Errorf("an exec has printed %q and ended with %v", s.Stdout.String(), err))
	}
	return nil
}

// attach attaches and leaves.
func (l *life) attach(ctx context.Context, c *soakContainer) error {
	resp, err := l.h.Runtime().Attach(ctx, &cri.AttachRequest{ContainerId: c.id, Stdout: true, Stderr: true})
	if err != nil {
		return l.broken(fmt.Errorf("attach: %w", err))
	}
	s := l.streams().Open(ctx, resp.Url, kubelet.Wants{Stdout: true, Stderr: true})
	select {
	case <-s.Done():
		return l.broken(fmt.Errorf("an attach has ended by itself: %w", s.Wait(0)))
	case <-time.After(time.Duration(l.h.n(int(200 * time.Millisecond)))):
	}
	s.Leave()
	return nil
}

// forward sends something through a port, if the container listens.
func (l *life) forward(ctx context.Context, c *soakContainer) error {
	var port int
	if _, err := fmt.Sscanf(strings.Join(c.config.Args, " "), "tcp :%d", &port); err != nil {
		return nil //nolint:nilerr // it does something else
	}
	var err error
	if wait.Until(ctx, func() bool { // it may not listen yet
		err = l.echo(ctx, port)
		return err == nil || l.h.shaken
	}) {
		return nil
	}
	return err
}

// echo connects to a port of the pod once.
func (l *life) echo(ctx context.Context, port int) error {
	resp, err := l.h.Runtime().PortForward(ctx, &cri.PortForwardRequest{PodSandboxId: l.id})
	if err != nil {
		return fmt.Errorf("PortForward: %w", err)
	}
	tunnel, err := l.streams().Tunnel(ctx, resp.Url)
	if err != nil {
		return fmt.Errorf("tunnel: %w", err)
	}
	defer func() { _ = tunnel.Close() }()
	wire, err := tunnel.Connect(port)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if _, err := io.WriteString(wire, "hello"); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	if err := wire.Close(); err != nil {
		return err
	}
	if echo, err := io.ReadAll(wire); err != nil || string(echo) != "hello" {
		return fmt.Errorf("the port echoes %q, %v", echo, err)
	}
	return nil
}

func (l *life) streams() kubelet.Streams {
	return kubelet.Streams{Within: l.h.Do, WebSocket: false}
}

// broken ignores the error of a session of a server that may have been stopped.
func (l *life) broken(err error) error {
	if l.h.shaken {
		return nil
	}
	return err
}

func (l *life) resize(ctx context.Context, c *soakContainer) error {
	return l.h.call(ctx, "UpdateContainerResources", func(ctx context.Context) error {
		_, err := l.h.Runtime().UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{ContainerId: c.id,
			Linux: &cri.LinuxContainerResources{CpuShares: int64(2 + l.h.n(1000)), MemoryLimitInBytes: int64(100+l.h.n(100)) * mib}})
		return err
	})
}

func (l *life) measure(ctx context.Context, c *soakContainer) error {
	return l.h.call(ctx, "ContainerStats", func(ctx context.Context) error {
		_, err := l.h.Runtime().ContainerStats(ctx, &cri.ContainerStatsRequest{ContainerId: c.id})
		return err
	})
}

// rotate does what a kubelet does with a log that is too long.
func (l *life) rotate(ctx context.Context, c *soakContainer) {
	log := filepath.Join(l.config.LogDirectory, c.config.LogPath)
	old := log + ".1"
	err := os.Rename(log, old)
	if errors.Is(err, os.ErrNotExist) { // the last reopening did not succeed
		err = nil
	}
	if err == nil {
		err = l.h.call(ctx, "ReopenContainerLog", func(ctx context.Context) error {
			_, err := l.h.Runtime().ReopenContainerLog(ctx, &cri.ReopenContainerLogRequest{ContainerId: c.id})
			return err
		})
	}
	if err := errors.Join(err, cut(old)); err != nil && ctx.Err() == nil {
		l.h.problem(err)
	}
}

// end removes the pod in one of a kubelet's ways.
func (l *life) end(ctx context.Context) error {
	if l.id == "" {
		return nil
	}
	if l.h.n(2) == 0 {
		for _, c := range l.containers {
			if err := l.h.call(ctx, "StopContainer", func(ctx context.Context) error {
				_, err := l.h.Runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: c.id, Timeout: int64(l.h.n(2))})
				return err
			}); err != nil {
				return err
			}
		}
	}
	for _, step := range []struct {
		name string
		call func(context.Context) error
	}{
		{"StopPodSandbox", func(ctx context.Context) error {
			_, err := l.h.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: l.id})
			return err
		}},
		{"RemovePodSandbox", func(ctx context.Context) error {
			_, err := l.h.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: l.id})
			return err
		}},
	} {
		if err := l.h.call(ctx, step.name, step.call); err != nil {
			return err
		}
	}
	return os.RemoveAll(l.config.LogDirectory)
}
