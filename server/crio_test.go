package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/test/kit/wait"
)

// asCrio serves a node's server on a second socket, and returns its path.
func asCrio(t *testing.T, n *node) string {
	t.Helper()
	cfg := DefaultConfig()
	cfg.Listen = filepath.Join(t.TempDir(), "crio.sock")
	l, err := Listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- n.server.ServeAsCrio(t.Context(), l) }()
	t.Cleanup(func() { // before n's own
		ctx, cancel := context.WithTimeout(context.Background(), wait.Limit)
		defer cancel()
		if err := n.server.Shutdown(ctx); err != nil {
			t.Errorf("Shutdown: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("ServeAsCrio: %v", err)
		}
		if _, err := net.Dial("unix", cfg.Listen); err == nil {
			t.Error("the socket answers after Shutdown")
		}
	})
	return cfg.Listen
}

// ask does what cAdvisor's client does.
func ask(t *testing.T, socket, path string) (code int, body string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", socket)
	}}}
	resp, err := client.Get("http://crio" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

func crioNode(t *testing.T) *node {
	n := start(t)
	meta := &cri.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "u-1", Attempt: 3}
	n.engine.sandboxes = []*view.Sandbox{{ID: idOf(1), IPs: []string{"10.0.0.1"}, CreatedAt: time.Unix(0, 5),
		Config: &cri.PodSandboxConfig{Metadata: meta, Labels: map[string]string{"io.kubernetes.pod.name": "web"}}}}
	n.engine.containers = []*view.Container{
		{ID: idOf(3), SandboxID: idOf(1), State: cri.ContainerState_CONTAINER_EXITED, PID: 99, Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "old"}}},
		{ID: idOf(2), SandboxID: idOf(1), State: cri.ContainerState_CONTAINER_RUNNING, PID: 42, CreatedAt: time.Unix(0, 6), LogPath: "/log", ImageID: "sha256:1", ImageRef: "nginx@sha256:1",
			Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "nginx", Attempt: 4}, Annotations: map[string]string{"a": "b"},
				Labels: map[string]string{"io.kubernetes.container.name": "nginx"}}},
	}
	return n
}

func TestCrioAnswers(t *testing.T) {
	t.Parallel()
	n := crioNode(t)
	socket := asCrio(t, n)
	for path, want := range map[string]string{
		"/info": `{"storage_driver":"crius","storage_root":"/img","storage_image":""}`,
		"/containers/" + idOf(2): fmt.Sprintf(`{"name":"k8s_nginx_web_default_u-1_4","pid":42,"image":"nginx@sha256:1","image_ref":"sha256:1","created_time":6,`+
			`"labels":{"io.kubernetes.container.name":"nginx"},"annotations":{"a":"b"},"log_path":"/log","root":"","sandbox":"%s","ip_addresses":["10.0.0.1"]}`, idOf(1)),
		"/containers/" + idOf(1): fmt.Sprintf(`{"name":"k8s_POD_web_default_u-1_3","pid":42,"image":"","image_ref":"","created_time":5,`+
			`"labels":{"io.kubernetes.container.name":"POD","io.kubernetes.pod.name":"web"},"annotations":null,"log_path":"","root":"","sandbox":"%s","ip_addresses":["10.0.0.1"]}`, idOf(1)),
	} {
		// If a container's cgroup is not a systemd scope, cAdvisor takes the
		// cgroup's complete name for the id.
		for _, path := range []string{path, strings.Replace(path, "/containers/", "/containers/crio-", 1)} {
			code, body := ask(t, socket, path)
			if body = strings.TrimSpace(body); code != http.StatusOK || body != want || !json.Valid([]byte(body)) {
				t.Errorf("%s: %d %s\nwant %s", path, code, body, want)
			}
		}
	}
	for _, path := range []string{"/containers/" + idOf(7), "/containers/" + idOf(2)[:10], "/containers/%00", "/containers/", "/containers/crio-" + idOf(7), "/containers/crio-crio-" + idOf(2), "/containers/crio-", "/config", "/pause/" + idOf(2)} {
		if code, body := ask(t, socket, path); code != http.StatusNotFound {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	if _, err := cri.NewRuntimeServiceClient(dial(t, socket)).Version(t.Context(), &cri.VersionRequest{}); err != nil {
		t.Errorf("gRPC on the same socket: %v", err)
	}
}

// The main socket speaks only gRPC.
func TestCrioIsNotOnTheMainSocket(t *testing.T) {
	t.Parallel()
	n := crioNode(t)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", n.socket)
	}}}
	if resp, err := client.Get("http://crio/info"); err == nil {
		resp.Body.Close()
		t.Errorf("the main socket answers %s", resp.Status)
	}
}

// A client that connects and stays silent delays neither others nor Shutdown.
func TestSilentConnectionsHoldUpNobody(t *testing.T) {
	t.Parallel()
	n := crioNode(t)
	socket := asCrio(t, n)
	for i := range maxSilent / 2 {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.Write([]byte("PR")[:i%3])
	}
	if code, body := ask(t, socket, "/info"); code != http.StatusOK {
		t.Errorf("%d %s", code, body)
	}
	if _, err := cri.NewRuntimeServiceClient(dial(t, socket)).Version(t.Context(), &cri.VersionRequest{}); err != nil {
		t.Errorf("gRPC: %v", err)
	}
}

func TestSplitClosesSilentConnections(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	s := split(l)
	s.patience = time.Hour // with which run would not end
	ran := make(chan error, 1)
	go func() { ran <- s.run(t.Context()) }()
	conn, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	wait.For(t, "the connection to be taken", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.conns) == 1
	})
	if err := s.http.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ran:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(wait.Limit):
		t.Fatal("run waits for a connection that says nothing")
	}
	if _, err := s.grpc.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after Close: %v", err)
	}
	if err := s.grpc.Close(); err != nil {
		t.Errorf("a second Close: %v", err)
	}
}

// hiccup fails its first Accept like a process without free descriptors.
type hiccup struct {
	net.Listener
	failed atomic.Bool
}

func (h *hiccup) Accept() (net.Conn, error) {
	if !h.failed.Swap(true) {
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	return h.Listener.Accept()
}

func TestSplitOutlivesAMomentWithoutDescriptors(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	s := split(&hiccup{Listener: l})
	ran := make(chan error, 1)
	go func() { ran <- s.run(t.Context()) }()
	conn, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("GET /")); err != nil {
		t.Fatal(err)
	}
	got, err := s.http.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	text := make([]byte, 5)
	if _, err := io.ReadFull(got, text); err != nil || string(text) != "GET /" {
		t.Errorf("it says %q, %v", text, err)
	}
	if err := errors.Join(s.http.Close(), <-ran); err != nil {
		t.Error(err)
	}
}
