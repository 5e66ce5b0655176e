package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/view"
)

// One in nine fixes in the largest runtimes is for a crash of the daemon.
func TestPanicEndsOneCall(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.hook = func(_ context.Context, verb string) error {
		if verb == "StartContainer" {
			var view *view.Container
			_ = view.ID //nolint:govet // it panics, that is the case
		}
		return nil
	}
	n.engine.sandboxes = []*view.Sandbox{nil} // panics in the translation of a stream
	id := freshID()
	_, err := n.runtime.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: id})
	wantCode(t, err, codes.Internal)
	if text := status.Convert(err).Message(); text != "StartContainer: "+fault.Internal.Error() {
		t.Errorf("message %q gives away more than it should", text)
	}
	stream, err := n.runtime.StreamPodSandboxes(t.Context(), &cri.StreamPodSandboxesRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	wantCode(t, err, codes.Internal)

	if _, err := n.runtime.Version(t.Context(), &cri.VersionRequest{}); err != nil {
		t.Errorf("the server is gone: %v", err)
	}
	lines := logs.about(id)
	if len(lines) != 1 || lines[0]["level"] != "ERROR" || lines[0]["container"] != id {
		t.Errorf("log of the call: %v", lines)
	}
	stacks := logs.about("TestPanicEndsOneCall")
	if len(stacks) == 0 || stacks[0]["level"] != "ERROR" || stacks[0]["work"] != "StartContainer" {
		t.Errorf("log of the panic: %v", stacks)
	}
}

func TestLogOfCalls(t *testing.T) {
	t.Parallel()
	n := start(t)
	good, bad, old, web, image := freshID(), freshID(), freshID(), freshID(), freshID()
	ctx := t.Context()
	n.runtime.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: good})
	n.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: bad})
	n.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: web, Namespace: "ns"}}})
	n.image.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: image + "\n" + strings.Repeat("x", 1<<20)}})
	n.conn.Invoke(ctx, "/runtime.v1alpha2.RuntimeService/StopPodSandbox", &cri.StopPodSandboxRequest{PodSandboxId: old}, &cri.StopPodSandboxResponse{})
	for _, c := range []struct {
		mark string
		want map[string]any
	}{
		{good, map[string]any{"level": "DEBUG", "msg": "CRI call", "container": good, "method": "/runtime.v1.RuntimeService/StopContainer"}},
		{bad, map[string]any{"level": "INFO", "msg": "container status failed", "container": bad, "code": "NotFound", "err": `container "` + bad + `" not found`}},
		{web, map[string]any{"level": "DEBUG", "pod_name": "ns/" + web}},
		{image, map[string]any{"level": "INFO", "msg": "image status failed", "code": "InvalidArgument"}},
		{old, map[string]any{"level": "DEBUG", "pod": old, "method": "/runtime.v1alpha2.RuntimeService/StopPodSandbox"}},
	} {
		lines := logs.about(c.mark)
		if len(lines) != 1 {
			t.Errorf("%d lines about %s", len(lines), c.mark)
			continue
		}
		for key, want := range c.want {
			if lines[0][key] != want {
				t.Errorf("%s is %v, want %v", key, lines[0][key], want)
			}
		}
		if took, ok := lines[0]["took"].(float64); !ok || took <= 0 {
			t.Errorf("took is %v", lines[0]["took"])
		}
		if len(fmt.Sprint(lines[0])) > 1000 {
			t.Errorf("a client makes a line of %d bytes", len(fmt.Sprint(lines[0])))
		}
	}
}

// A reader of the log looks for the pod by its name, not by its id.
func TestLogOfFailedCallsNamesPodAndContainer(t *testing.T) {
	t.Parallel()
	n := start(t)
	id, pod := freshID(), freshID()
	n.engine.sandboxes = []*view.Sandbox{{ID: pod, Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "shop"}}}}
	n.engine.containers = []*view.Container{{ID: id, SandboxID: pod, Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "nginx"}}}}
	n.engine.hook = func(_ context.Context, verb string) error {
		if verb == "StartContainer" {
			return fmt.Errorf("runc: no such program: %w", fault.Invalid)
		}
		return nil
	}
	_, err := n.runtime.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: id})
	wantCode(t, err, codes.InvalidArgument)
	lines := logs.about(id)
	if len(lines) != 1 {
		t.Fatalf("%d lines: %v", len(lines), lines)
	}
	for key, want := range map[string]string{
		"level": "INFO", "msg": "start container failed", "container_name": "nginx", "pod_name": "shop/web",
		"code": "InvalidArgument", "err": "runc: no such program",
	} {
		if lines[0][key] != want {
			t.Errorf("%s is %v, want %s", key, lines[0][key], want)
		}
	}
}

// Whoever reads an error on a terminal or as an event knows the names, and nobody knows ids.
func TestErrorsNamePodsAndContainersBesideIDs(t *testing.T) {
	t.Parallel()
	n := start(t)
	id, pod, gone := strings.Repeat("0a", 32), strings.Repeat("0b", 32), strings.Repeat("0c", 32)
	n.engine.sandboxes = []*view.Sandbox{{ID: pod, Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "shop"}}}}
	n.engine.containers = []*view.Container{{ID: id, SandboxID: pod, State: cri.ContainerState_CONTAINER_EXITED, Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "nginx"}}}}
	n.engine.hook = func(_ context.Context, verb string) error {
		if verb == "StopContainer" {
			return fmt.Errorf("stop container %s: pod %s, container %s, again %s, named %s (shop/web): %w", id, pod, gone, id, pod, fault.Invalid)
		}
		return nil
	}
	_, err := n.runtime.StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: id})
	wantCode(t, err, codes.InvalidArgument)
	want := fmt.Sprintf("stop container %s (shop/web/nginx): pod %s (shop/web), container %s, again %s, named %s (shop/web)", id, pod, gone, id, pod)
	if got := status.Convert(err).Message(); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	_, err = n.runtime.Exec(t.Context(), &cri.ExecRequest{ContainerId: id, Cmd: []string{"ls"}, Stdout: true})
	if want := "container " + id + " (shop/web/nginx) is in state CONTAINER_EXITED"; !strings.Contains(fmt.Sprint(err), want) {
		t.Errorf("%v, want %q", err, want)
	}
}

// Errors of sessions go to clients without a call.
func TestTextsOfSessionsNamePodsAndContainers(t *testing.T) {
	t.Parallel()
	id, pod := strings.Repeat("0a", 32), strings.Repeat("0b", 32)
	text := TextFor(&fakeEngine{
		sandboxes:  []*view.Sandbox{{ID: pod, Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "shop"}}}},
		containers: []*view.Container{{ID: id, SandboxID: pod, Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "nginx"}}}},
	})
	for want, err := range map[string]error{
		"exec in container " + id + " (shop/web/nginx): no such command": fmt.Errorf("exec in container %s: no such command: %w", id, fault.Invalid),
		"pod " + pod + " (shop/web) is not ready":                        fmt.Errorf("pod %s is not ready: %w", pod, fault.Precondition),
	} {
		if got := text(err); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestMessageSizes(t *testing.T) {
	t.Parallel()
	n := start(t, func(c *Config, _ *Services) { c.MaxMessageSize = minMessageSize })
	big := maximalSandboxConfig()
	big.DnsConfig.Servers[0] = strings.Repeat("x", minMessageSize)
	_, err := n.runtime.RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: big})
	wantCode(t, err, codes.ResourceExhausted)

	n.engine.exec = oci.ExecResult{Stdout: make([]byte, 16<<20)}
	resp, err := n.runtime.ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: idOf(1), Cmd: []string{"yes"}})
	if err != nil || len(resp.Stdout) != minMessageSize-messageOverhead {
		t.Errorf("%d bytes, %v", len(resp.GetStdout()), err)
	}

	cfg := DefaultConfig()
	cfg.MaxMessageSize = minMessageSize - 1
	if _, err := New(cfg, Services{Engine: n.engine, Usage: n.engine}); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "max_message_size") {
		t.Errorf("got %v", err)
	}
}

func TestHealth(t *testing.T) {
	t.Parallel()
	n := start(t)
	client := healthpb.NewHealthClient(n.conn)
	for _, service := range []string{
		"", "runtime.v1.RuntimeService", "runtime.v1.ImageService", "runtime.v1alpha2.RuntimeService", "runtime.v1alpha2.ImageService",
	} {
		resp, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
		if err != nil || resp.Status != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("%q: %v, %v", service, resp, err)
		}
	}
	_, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "runtime.v2.RuntimeService"})
	wantCode(t, err, codes.NotFound)
}

// serving starts a server that the test itself shuts down, and one call that
// hangs in it until release is closed or, if it heeds its context, is
// cancelled.
func serving(t *testing.T, heeds bool) (s *Server, socket string, release chan struct{}, answer, served chan error) {
	t.Helper()
	release, entered := make(chan struct{}), make(chan struct{})
	engine := &fakeEngine{}
	engine.hook = func(ctx context.Context, _ string) error {
		close(entered)
		done := ctx.Done()
		if !heeds {
			done = nil
		}
		select {
		case <-release:
			return nil
		case <-done:
			return ctx.Err()
		}
	}
	cfg := DefaultConfig()
	cfg.Listen = filepath.Join(t.TempDir(), "s")
	s, err := New(cfg, Services{Engine: engine, Status: engine, Usage: engine, Images: &fakeImages{}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := Listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	served, answer = make(chan error, 1), make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	client := cri.NewRuntimeServiceClient(dial(t, cfg.Listen))
	go func() {
		_, err := client.StartContainer(context.Background(), &cri.StartContainerRequest{ContainerId: idOf(1)})
		answer <- err
	}()
	<-entered
	return s, cfg.Listen, release, answer, served
}

func TestShutdownDrains(t *testing.T) {
	t.Parallel()
	s, socket, release, answer, served := serving(t, true)
	down := make(chan error, 1)
	go func() { down <- s.Shutdown(context.Background()) }()
	for {
		if _, err := os.Lstat(socket); errors.Is(err, fs.ErrNotExist) {
			break // no new calls
		}
		time.Sleep(time.Millisecond)
	}
	select {
	case err := <-down:
		t.Fatalf("Shutdown did not wait: %v", err)
	case err := <-answer:
		t.Fatalf("the call under way was ended: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(release)
	for what, c := range map[string]chan error{"the call under way": answer, "Shutdown": down, "Serve": served} {
		if err := <-c; err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestShutdownIsBounded(t *testing.T) {
	t.Parallel()
	for _, heeds := range []bool{true, false} {
		s, _, release, answer, served := serving(t, heeds)
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		if err := s.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Shutdown: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
		if err := <-answer; err == nil {
			t.Error("the call was answered")
		}
		close(release)
	}
}

func TestShutdownBeforeServe(t *testing.T) {
	t.Parallel()
	cfg := DefaultConfig()
	cfg.Listen = filepath.Join(t.TempDir(), "s")
	s, err := New(cfg, Services{Engine: &fakeEngine{}, Status: &fakeEngine{}, Usage: &fakeEngine{}, Images: &fakeImages{}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	l, err := Listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Serve(l); !errors.Is(err, grpc.ErrServerStopped) {
		t.Errorf("Serve: %v", err)
	}
}
