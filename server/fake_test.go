package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/pod/usage"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/registry/verifier"
	"github.com/crius-run/crius/test/kit/wait"
)

// logs collects the package's log lines while tests run.
var logs recorder

// TestMain also proves that no test left a goroutine of gRPC or of this package
// behind: servers and clients of all tests are closed by then.
func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.NewJSONHandler(&logs, &slog.HandlerOptions{Level: slog.LevelDebug})))
	code := m.Run()
	if leak := leakedGoroutines(); code == 0 && leak != "" {
		fmt.Fprintf(os.Stderr, "goroutines left behind:\n%s\n", leak)
		code = 1
	}
	os.Exit(code)
}

// leakedGoroutines gives goroutines time to end and returns the stacks of those
// that do not.
func leakedGoroutines() string {
	var leaks []string
	wait.Until(context.Background(), func() bool {
		buf := make([]byte, 4<<20)
		stacks := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
		leaks = slices.DeleteFunc(stacks[1:], func(stack string) bool { // the first one is this goroutine
			return !strings.Contains(stack, "google.golang.org/grpc") && !strings.Contains(stack, "crius/server")
		})
		return len(leaks) == 0
	})
	return strings.Join(leaks, "\n\n")
}

// recorder keeps log lines.
type recorder struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (r *recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.buf.Write(p)
}

// about returns the lines that contain mark.
func (r *recorder) about(mark string) []map[string]any {
	r.mu.Lock()
	defer r.mu.Unlock()
	var found []map[string]any
	for line := range strings.Lines(r.buf.String()) {
		if strings.Contains(line, mark) {
			entry := map[string]any{}
			if err := json.Unmarshal([]byte(line), &entry); err != nil {
				panic(err)
			}
			found = append(found, entry)
		}
	}
	return found
}

// call is one call of a fake, spelled "Verb(args)".
type call struct {
	verb string
	args []any
}

// script is the behaviour that the two fakes share: they record calls and do as
// hook says.
type script struct {
	mu    sync.Mutex
	calls []call
	hook  func(ctx context.Context, verb string) error
}

func (s *script) did(ctx context.Context, verb string, args ...any) error {
	s.mu.Lock()
	s.calls = append(s.calls, call{verb, args})
	hook := s.hook
	s.mu.Unlock()
	if hook == nil {
		return nil
	}
	return hook(ctx, verb)
}

// last returns the latest call and forgets all calls.
func (s *script) last() call {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.calls) == 0 {
		return call{}
	}
	c := s.calls[len(s.calls)-1]
	s.calls = nil
	return c
}

func (s *script) failing(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hook = func(context.Context, string) error { return err }
}

type fakeEngine struct {
	script
	sandboxes      []*view.Sandbox
	containers     []*view.Container
	containerStats []*usage.ContainerStats
	sandboxStats   []*usage.SandboxStats
	metrics        []*usage.PodMetrics
	delegates      bool // writable cgroup mounts can be given
	offers         cgroup.Offers
	measured       usage.MetricParts // by the latest Metrics
	spec           json.RawMessage
	exec           oci.ExecResult
	handlers       []*cri.RuntimeHandler
	images         *fakeImages // which it pulls and removes
	runtimeErr     error
	statusErr      error
	networkErr     error
}

func (f *fakeEngine) RunSandbox(ctx context.Context, handler string, cfg *cri.PodSandboxConfig) (string, error) {
	return idOf(1), f.did(ctx, "RunSandbox", handler, cfg)
}

func (f *fakeEngine) StopSandbox(ctx context.Context, id string) error {
	return f.did(ctx, "StopSandbox", id)
}

func (f *fakeEngine) RemoveSandbox(ctx context.Context, id string) error {
	return f.did(ctx, "RemoveSandbox", id)
}

func (f *fakeEngine) Sandbox(id string) (*view.Sandbox, error) {
	for _, v := range f.sandboxes {
		if strings.HasPrefix(v.ID, id) {
			return v, f.did(context.Background(), "Sandbox", id)
		}
	}
	return nil, fmt.Errorf("pod %q %w", id, fault.NotFound)
}

func (f *fakeEngine) Sandboxes() []*view.Sandbox { return f.sandboxes }

func (f *fakeEngine) CreateContainer(ctx context.Context, sandboxID string, cfg *cri.ContainerConfig, sandboxCfg *cri.PodSandboxConfig) (string, error) {
	return idOf(2), f.did(ctx, "CreateContainer", sandboxID, cfg, sandboxCfg)
}

func (f *fakeEngine) StartContainer(ctx context.Context, id string) error {
	return f.did(ctx, "StartContainer", id)
}

func (f *fakeEngine) StopContainer(ctx context.Context, id string, grace time.Duration) error {
	return f.did(ctx, "StopContainer", id, grace)
}

func (f *fakeEngine) RemoveContainer(ctx context.Context, id string) error {
	return f.did(ctx, "RemoveContainer", id)
}

func (f *fakeEngine) Container(id string) (*view.Container, error) {
	for _, v := range f.containers {
		if strings.HasPrefix(v.ID, id) {
			return v, f.did(context.Background(), "Container", id)
		}
	}
	return nil, fmt.Errorf("container %q %w", id, fault.NotFound)
}

func (f *fakeEngine) Containers() []*view.Container { return f.containers }

func (f *fakeEngine) SandboxContainers(id string) ([]*view.Container, error) {
	var views []*view.Container
	for _, v := range f.containers {
		if v.SandboxID == id {
			views = append(views, v)
		}
	}
	return views, nil
}
func (f *fakeEngine) StopEvents()                     {}
func (f *fakeEngine) Listen() (*view.Listener, error) { return nil, fault.Exhausted }
func (f *fakeEngine) CheckpointContainer(ctx context.Context, id, location string, timeout time.Duration) error {
	return f.did(ctx, "CheckpointContainer", id, location, timeout)
}

func (f *fakeEngine) RestoreSandbox(ctx context.Context, req pod.RestoreRequest) (string, error) {
	return idOf(1), f.did(ctx, "RestoreSandbox", req)
}

func (f *fakeEngine) CheckpointSandbox(ctx context.Context, id, dir string, containers []string) error {
	return f.did(ctx, "CheckpointSandbox", id, dir, containers)
}

func (f *fakeEngine) UpdateSandboxResources(_ context.Context, id string, overhead, resources *cri.LinuxContainerResources) error {
	return f.did(context.Background(), "UpdateSandboxResources", id, overhead, resources)
}
func (f *fakeEngine) ContainerStats(_ context.Context, wanted func(*view.Container) bool) []*usage.ContainerStats {
	return slices.DeleteFunc(slices.Clone(f.containerStats), func(s *usage.ContainerStats) bool { return !wanted(s.View) })
}

func (f *fakeEngine) SandboxStats(_ context.Context, wanted func(*view.Sandbox) bool) []*usage.SandboxStats {
	return slices.DeleteFunc(slices.Clone(f.sandboxStats), func(s *usage.SandboxStats) bool { return !wanted(s.View) })
}

func (f *fakeEngine) Metrics(_ context.Context, parts usage.MetricParts) []*usage.PodMetrics {
	f.measured = parts
	return f.metrics
}

func (f *fakeEngine) MetricOffers() cgroup.Offers { return f.offers }

func (f *fakeEngine) UpdateContainerResources(ctx context.Context, id string, r *cri.LinuxContainerResources) error {
	return f.did(ctx, "UpdateContainerResources", id, r)
}

func (f *fakeEngine) ExecSync(ctx context.Context, id string, cmd []string, timeout time.Duration) (*oci.ExecResult, error) {
	return &f.exec, f.did(ctx, "ExecSync", id, cmd, timeout)
}

func (f *fakeEngine) ReopenContainerLog(ctx context.Context, id string) error {
	return f.did(ctx, "ReopenContainerLog", id)
}

func (f *fakeEngine) PodSpec(string) (json.RawMessage, error) { return f.RuntimeSpec("") }

func (f *fakeEngine) RuntimeSpec(string) (json.RawMessage, error) {
	if f.spec == nil {
		return nil, fault.NotFound
	}
	return f.spec, nil
}

func (f *fakeEngine) Handlers(context.Context) []*cri.RuntimeHandler { return f.handlers }

func (f *fakeEngine) RuntimeStatus(context.Context) (*view.RuntimeStatus, error) {
	return &view.RuntimeStatus{NotReady: f.runtimeErr, Handlers: f.handlers, CgroupDelegation: f.delegates, Seccomp: f.delegates}, f.statusErr
}

func (f *fakeEngine) NetworkStatus(context.Context) (*view.NetworkStatus, error) {
	return &view.NetworkStatus{NotReady: f.networkErr}, nil
}

func (f *fakeEngine) PullImage(ctx context.Context, req storage.PullRequest) (*storage.Image, error) {
	return f.images.pull(ctx, req)
}

func (f *fakeEngine) RemoveImage(ctx context.Context, ref string) error {
	return f.images.did(ctx, "RemoveImage", ref)
}

func (f *fakeEngine) PullSecurityProfile(ctx context.Context, req storage.PullRequest) (bool, error) {
	return true, f.images.did(ctx, "PullSecurityProfile", req)
}

func (f *fakeEngine) SecurityProfiles() []storage.Profile {
	return []storage.Profile{{Digest: "sha256:" + idOf(7), Refs: []string{"r.example/p@sha256:" + idOf(7)}, Size: 5}}
}

func (f *fakeEngine) RemoveSecurityProfile(ctx context.Context, digest string) error {
	return f.images.did(ctx, "RemoveSecurityProfile", digest)
}

func (f *fakeEngine) CgroupDriver() cri.CgroupDriver { return cri.CgroupDriver_CGROUPFS }
func (f *fakeEngine) SetPodCIDR(cidr string) error {
	return f.did(context.Background(), "SetPodCIDR", cidr)
}

type fakeImages struct {
	script
	images   []*storage.Image
	verdicts []verifier.Verdict
}

func (f *fakeImages) Images(ctx context.Context) ([]*storage.Image, error) {
	return f.images, f.did(ctx, "Images")
}

func (f *fakeImages) LookUp(ctx context.Context, ref string) (*storage.Image, error) {
	if err := f.did(ctx, "Image", ref); err != nil {
		return nil, err
	}
	for _, i := range f.images {
		if i.ID == ref || slices.Contains(i.RepoTags, ref) {
			return i, nil
		}
	}
	return nil, fmt.Errorf("image %s: %w", ref, fault.NotFound)
}

func (f *fakeImages) Spec(ctx context.Context, image *storage.Image) (*imagespec.Image, error) {
	return &imagespec.Image{Config: *image.Config, Author: "me"}, f.did(ctx, "Spec", image.ID)
}

func (f *fakeImages) Verdicts(context.Context, *storage.Image) ([]verifier.Verdict, error) {
	return f.verdicts, nil
}

func (f *fakeImages) pull(ctx context.Context, req storage.PullRequest) (*storage.Image, error) {
	if err := f.did(ctx, "PullImage", req); err != nil {
		return nil, err
	}
	return f.images[0], nil
}

func (f *fakeImages) FsInfo(ctx context.Context) (images, containers storage.FsUsage, err error) {
	usage := storage.FsUsage{Mountpoint: "/img", UsedBytes: 1, InodesUsed: 2, Timestamp: time.Unix(0, 3)}
	return usage, storage.FsUsage{Mountpoint: "/ctr", UsedBytes: 4, InodesUsed: 5, Timestamp: time.Unix(0, 6)}, f.did(ctx, "FsInfo")
}

// idOf returns a well-formed id.
func idOf(n int) string { return fmt.Sprintf("%064x", n) }

// freshID returns an id that no other test, nor another run of this one, puts
// into the log.
func freshID() string { return idOf(int(1<<30 + serial.Add(1))) }

var serial atomic.Int64

// node is a server on its own socket, with clients of both API versions.
type node struct {
	engine  *fakeEngine
	images  *fakeImages
	server  *Server
	socket  string
	conn    *grpc.ClientConn
	runtime cri.RuntimeServiceClient
	image   cri.ImageServiceClient
}

// start serves until the test ends.
func start(t testing.TB, configure ...func(*Config, *Services)) *node {
	t.Helper()
	n := &node{
		engine: &fakeEngine{handlers: []*cri.RuntimeHandler{{Name: ""}, {Name: "crun"}, {Name: "runc"}}},
		images: &fakeImages{images: []*storage.Image{someImage()}},
	}
	n.engine.images = n.images
	cfg := DefaultConfig()
	cfg.Listen = filepath.Join(t.TempDir(), "s")
	services := Services{Engine: n.engine, Status: n.engine, Usage: n.engine, Images: n.images, PodMetrics: DefaultPodMetricKinds, Version: "1.2.3"}
	for _, c := range configure {
		c(&cfg, &services)
	}
	n.socket = cfg.Listen
	server, err := New(cfg, services)
	if err != nil {
		t.Fatal(err)
	}
	n.server = server
	l, err := Listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	n.conn = dial(t, n.socket)
	n.runtime = cri.NewRuntimeServiceClient(n.conn)
	n.image = cri.NewImageServiceClient(n.conn)
	t.Cleanup(func() {
		n.conn.Close()
		ctx, cancel := context.WithTimeout(context.Background(), wait.Limit)
		defer cancel()
		if err := server.Shutdown(ctx); err != nil {
			t.Errorf("Shutdown: %v", err)
		}
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) { // if the test has ended before it began
			t.Errorf("Serve: %v", err)
		}
	})
	return n
}

func dial(t testing.TB, socket string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(clientMessageSize)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func someImage() *storage.Image {
	return &storage.Image{
		ID:          idOf(9),
		RepoTags:    []string{"registry.example/web:1"},
		RepoDigests: []string{"registry.example/web@sha256:" + idOf(8)},
		Size:        7,
		Config:      &imagespec.ImageConfig{User: "1000", Env: []string{"A=b"}},
		Pinned:      true,
	}
}

func wantCode(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Errorf("code %v, want %v: %v", got, want, err)
	}
}
