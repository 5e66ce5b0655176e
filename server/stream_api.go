package server

import (
	"cmp"
	"context"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/server/trail"
)

// Sessions hands out the URLs of sessions; *stream.Server is the one there is.
type Sessions interface {
	Exec(context.Context, *cri.ExecRequest) (url string, err error)
	Attach(context.Context, *cri.AttachRequest) (url string, err error)
	PortForward(context.Context, *cri.PortForwardRequest) (url string, err error)
}

// streamAPI is the part of RuntimeService that leads to sessions. What can be
// known to be wrong is said here, where there are codes to say it with.
type streamAPI struct {
	engine   Engine
	sessions Sessions
	trail    *trail.Trail // of requests that lead to no session; Sessions records those that do
}

func (s *streamAPI) Exec(ctx context.Context, req *cri.ExecRequest) (*cri.ExecResponse, error) {
	url, err := s.exec(ctx, req)
	if err != nil {
		s.trail.Refuse(ctx, trail.Request{Verb: trail.Exec, ID: req.GetContainerId(), Command: req.GetCmd(), Terminal: req.GetTty()}, err)
		return nil, err
	}
	return &cri.ExecResponse{Url: url}, nil
}

func (s *streamAPI) exec(ctx context.Context, req *cri.ExecRequest) (url string, err error) {
	if err := checkExec(req); err != nil {
		return "", err
	}
	id, err := s.running(req.GetContainerId())
	if err != nil {
		return "", err
	}
	req.ContainerId = id
	return s.sessions.Exec(ctx, req)
}

func (s *streamAPI) Attach(ctx context.Context, req *cri.AttachRequest) (*cri.AttachResponse, error) {
	url, err := s.attach(ctx, req)
	if err != nil {
		s.trail.Refuse(ctx, trail.Request{Verb: trail.Attach, ID: req.GetContainerId(), Terminal: req.GetTty()}, err)
		return nil, err
	}
	return &cri.AttachResponse{Url: url}, nil
}

func (s *streamAPI) attach(ctx context.Context, req *cri.AttachRequest) (url string, err error) {
	if err := checkAttach(req); err != nil {
		return "", err
	}
	id, err := s.running(req.GetContainerId())
	if err != nil {
		return "", err
	}
	req.ContainerId = id
	return s.sessions.Attach(ctx, req)
}

func (s *streamAPI) PortForward(ctx context.Context, req *cri.PortForwardRequest) (*cri.PortForwardResponse, error) {
	url, err := s.portForward(ctx, req)
	if err != nil {
		s.trail.Refuse(ctx, trail.Request{Verb: trail.PortForward, ID: req.GetPodSandboxId()}, err)
		return nil, err
	}
	return &cri.PortForwardResponse{Url: url}, nil
}

func (s *streamAPI) portForward(ctx context.Context, req *cri.PortForwardRequest) (url string, err error) {
	if err := checkPortForward(req); err != nil {
		return "", err
	}
	v, err := s.engine.Sandbox(req.GetPodSandboxId())
	if err != nil {
		return "", err
	}
	if v.State != cri.PodSandboxState_SANDBOX_READY {
		return "", fmt.Errorf("pod %s is not ready: %w", v.ID, fault.Precondition)
	}
	req.PodSandboxId = v.ID
	return s.sessions.PortForward(ctx, req)
}

// running is the full id of a running container.
func (s *streamAPI) running(id string) (string, error) {
	v, err := s.engine.Container(id)
	if err != nil {
		return "", err
	}
	if v.State != cri.ContainerState_CONTAINER_RUNNING {
		return "", fmt.Errorf("container %s is in state %s; exec and attach require a running container: %w", v.ID, v.State, fault.Precondition)
	}
	return v.ID, nil
}

func checkExec(req *cri.ExecRequest) error {
	return cmp.Or(
		wellFormed(req),
		checkID("container_id", req.GetContainerId()),
		checkCommand(req.GetCmd()),
		checkStreams(req),
	)
}

func checkAttach(req *cri.AttachRequest) error {
	return cmp.Or(wellFormed(req), checkID("container_id", req.GetContainerId()), checkStreams(req))
}

// checkStreams is about what ExecRequest and AttachRequest have in common (CRI:
// "One of `stdin`, `stdout`, and `stderr` MUST be true", and with a terminal
// stderr must be false).
func checkStreams(req interface {
	GetStdin() bool
	GetStdout() bool
	GetStderr() bool
	GetTty() bool
}) error {
	switch {
	case !req.GetStdin() && !req.GetStdout() && !req.GetStderr():
		return in("stdin, stdout, stderr", bad("are all false; request at least one of them"))
	case req.GetTty() && req.GetStderr():
		return in("stderr", bad("must be false with tty: a terminal has a single output stream"))
	}
	return nil
}

func checkPortForward(req *cri.PortForwardRequest) error {
	err := cmp.Or(wellFormed(req), checkID("pod_sandbox_id", req.GetPodSandboxId()))
	if err != nil {
		return err
	}
	return each("port", req.GetPort(), maxForwardPorts, func(port int32) error {
		if port < 1 || port > 1<<16-1 {
			return bad("is %d; ports are from 1 to 65535", port)
		}
		return nil
	})
}

// maxForwardPorts is more than anybody forwards by one request.
const maxForwardPorts = 1000
