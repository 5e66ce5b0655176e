package server

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/view"
)

// fakeSessions gives URLs that name the request's object.
type fakeSessions struct{ last proto.Message }

func (f *fakeSessions) Exec(_ context.Context, r *cri.ExecRequest) (string, error) {
	f.last = r
	return "exec:" + r.GetContainerId(), nil
}

func (f *fakeSessions) Attach(_ context.Context, r *cri.AttachRequest) (string, error) {
	f.last = r
	return "attach:" + r.GetContainerId(), nil
}

func (f *fakeSessions) PortForward(_ context.Context, r *cri.PortForwardRequest) (string, error) {
	f.last = r
	return "forward:" + r.GetPodSandboxId(), nil
}

// startStreaming is a node with a running and an exited container, a ready pod
// and one that is not.
func startStreaming(t *testing.T) (*node, *fakeSessions) {
	sessions := &fakeSessions{}
	n := start(t, func(_ *Config, s *Services) { s.Sessions = sessions })
	n.engine.containers = []*view.Container{
		{ID: idOf(1), State: cri.ContainerState_CONTAINER_RUNNING},
		{ID: idOf(2), State: cri.ContainerState_CONTAINER_EXITED},
		{ID: idOf(3), State: cri.ContainerState_CONTAINER_CREATED},
	}
	n.engine.sandboxes = []*view.Sandbox{
		{ID: idOf(4), State: cri.PodSandboxState_SANDBOX_READY},
		{ID: idOf(5), State: cri.PodSandboxState_SANDBOX_NOTREADY},
	}
	return n, sessions
}

func TestSessionURLs(t *testing.T) {
	t.Parallel()
	n, sessions := startStreaming(t)
	ctx := t.Context()
	exec := &cri.ExecRequest{ContainerId: idOf(1), Cmd: []string{"sh", ""}, Tty: true, Stdin: true, Stdout: true}
	r, err := n.runtime.Exec(ctx, exec)
	if err != nil || r.GetUrl() != "exec:"+idOf(1) || !proto.Equal(sessions.last, exec) {
		t.Errorf("exec: %v, %v, %v", r, err, sessions.last)
	}
	a, err := n.runtime.Attach(ctx, &cri.AttachRequest{ContainerId: idOf(1), Stdout: true, Stderr: true})
	if err != nil || a.GetUrl() != "attach:"+idOf(1) {
		t.Errorf("attach: %v, %v", a, err)
	}
	for _, ports := range [][]int32{nil, {1, 65535}} {
		f, err := n.runtime.PortForward(ctx, &cri.PortForwardRequest{PodSandboxId: idOf(4), Port: ports})
		if err != nil || f.GetUrl() != "forward:"+idOf(4) {
			t.Errorf("port-forward: %v, %v", f, err)
		}
	}
	var old cri.ExecResponse
	if err := n.conn.Invoke(ctx, "/runtime.v1alpha2.RuntimeService/Exec", exec, &old); err != nil || old.GetUrl() != r.GetUrl() {
		t.Errorf("exec by v1alpha2: %v, %v", &old, err)
	}
}

func TestSessionsRefused(t *testing.T) {
	t.Parallel()
	n, sessions := startStreaming(t)
	exec := func(id string, change func(*cri.ExecRequest)) error {
		r := &cri.ExecRequest{ContainerId: id, Cmd: []string{"sh"}, Stdout: true}
		change(r)
		return second(n.runtime.Exec(t.Context(), r))
	}
	attach := func(id string, r *cri.AttachRequest) error {
		r.ContainerId = id
		return second(n.runtime.Attach(t.Context(), r))
	}
	forward := func(id string, ports ...int32) error {
		return second(n.runtime.PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: id, Port: ports}))
	}
	as := func(*cri.ExecRequest) {}
	for name, c := range map[string]struct {
		err  error
		code codes.Code
		says string
	}{
		"exec, no id":              {exec("", as), codes.InvalidArgument, "container_id"},
		"exec, unknown":            {exec(idOf(9), as), codes.NotFound, idOf(9)},
		"exec, exited":             {exec(idOf(2), as), codes.FailedPrecondition, "CONTAINER_EXITED"},
		"exec, created":            {exec(idOf(3), as), codes.FailedPrecondition, "CONTAINER_CREATED"},
		"exec, no command":         {exec(idOf(1), func(r *cri.ExecRequest) { r.Cmd = nil }), codes.InvalidArgument, "cmd"},
		"exec, empty command":      {exec(idOf(1), func(r *cri.ExecRequest) { r.Cmd = []string{""} }), codes.InvalidArgument, "cmd"},
		"exec, NUL":                {exec(idOf(1), func(r *cri.ExecRequest) { r.Cmd = []string{"a\x00b"} }), codes.InvalidArgument, "cmd"},
		"exec, no streams":         {exec(idOf(1), func(r *cri.ExecRequest) { r.Stdout = false }), codes.InvalidArgument, "stdin, stdout, stderr"},
		"exec, terminal's stderr":  {exec(idOf(1), func(r *cri.ExecRequest) { r.Tty, r.Stderr = true, true }), codes.InvalidArgument, "tty"},
		"attach, no id":            {attach("", &cri.AttachRequest{Stdin: true}), codes.InvalidArgument, "container_id"},
		"attach, unknown":          {attach(idOf(9), &cri.AttachRequest{Stdin: true}), codes.NotFound, idOf(9)},
		"attach, exited":           {attach(idOf(2), &cri.AttachRequest{Stdin: true}), codes.FailedPrecondition, "CONTAINER_EXITED"},
		"attach, no streams":       {attach(idOf(1), &cri.AttachRequest{}), codes.InvalidArgument, "stdin, stdout, stderr"},
		"attach, terminal's error": {attach(idOf(1), &cri.AttachRequest{Tty: true, Stdout: true, Stderr: true}), codes.InvalidArgument, "tty"},
		"forward, no id":           {forward(""), codes.InvalidArgument, "pod_sandbox_id"},
		"forward, unknown":         {forward(idOf(9)), codes.NotFound, idOf(9)},
		"forward, not ready":       {forward(idOf(5)), codes.FailedPrecondition, "not ready"},
		"forward, port 0":          {forward(idOf(4), 80, 0), codes.InvalidArgument, "port[1] is 0"},
		"forward, port 65536":      {forward(idOf(4), 65536), codes.InvalidArgument, "port[0] is 65536"},
		"forward, negative port":   {forward(idOf(4), -1), codes.InvalidArgument, "port[0] is -1"},
	} {
		wantCode(t, c.err, c.code)
		if c.err == nil || !strings.Contains(c.err.Error(), c.says) {
			t.Errorf("%s: %v, want it to tell of %q", name, c.err, c.says)
		}
	}
	if sessions.last != nil {
		t.Errorf("a session was offered: %v", sessions.last)
	}
}
