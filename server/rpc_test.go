package server

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/storage"
)

// verb is an RPC that makes the layer below do something.
type verb struct {
	name string
	do   func(ctx context.Context, n *node) (proto.Message, error)
	want call          // the call that reaches the layer below
	resp proto.Message // the response
}

func verbs() []verb {
	id, ctr := idOf(1), idOf(2)
	sandbox, container := maximalSandboxConfig(), maximalContainerConfig()
	return []verb{
		{"RunPodSandbox", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: sandbox, RuntimeHandler: "crun"})
		}, call{"RunSandbox", []any{"crun", sandbox}}, &cri.RunPodSandboxResponse{PodSandboxId: id}},
		{"StopPodSandbox", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id})
		}, call{"StopSandbox", []any{id}}, &cri.StopPodSandboxResponse{}},
		{"RemovePodSandbox", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id})
		}, call{"RemoveSandbox", []any{id}}, &cri.RemovePodSandboxResponse{}},
		{"CreateContainer", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.runtime.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: id, Config: container, SandboxConfig: sandbox})
		}, call{"CreateContainer", []any{id, container, sandbox}}, &cri.CreateContainerResponse{ContainerId: ctr}},
		{"StartContainer", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: ctr})
		}, call{"StartContainer", []any{ctr}}, &cri.StartContainerResponse{}},
		{"StopContainer", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.runtime.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: ctr, Timeout: 30})
		}, call{"StopContainer", []any{ctr, 30 * time.Second}}, &cri.StopContainerResponse{}},
		{"RemoveContainer", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.runtime.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: ctr})
		}, call{"RemoveContainer", []any{ctr}}, &cri.RemoveContainerResponse{}},
		{"UpdatePodSandboxResources", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.runtime.UpdatePodSandboxResources(ctx, &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: id, Resources: container.Linux.Resources})
		}, call{"UpdateSandboxResources", []any{id, (*cri.LinuxContainerResources)(nil), container.Linux.Resources}}, &cri.UpdatePodSandboxResourcesResponse{}},
		{"UpdateContainerResources", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.runtime.UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{ContainerId: ctr, Linux: container.Linux.Resources})
		}, call{"UpdateContainerResources", []any{ctr, container.Linux.Resources}}, &cri.UpdateContainerResourcesResponse{}},
		{"ReopenContainerLog", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.runtime.ReopenContainerLog(ctx, &cri.ReopenContainerLogRequest{ContainerId: ctr})
		}, call{"ReopenContainerLog", []any{ctr}}, &cri.ReopenContainerLogResponse{}},
		{"ExecSync", func(ctx context.Context, n *node) (proto.Message, error) {
			n.engine.exec = oci.ExecResult{Stdout: []byte("o\xff"), Stderr: []byte("e"), ExitCode: 3}
			return n.runtime.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: ctr, Cmd: []string{"/bin/true", ""}, Timeout: 2})
		}, call{"ExecSync", []any{ctr, []string{"/bin/true", ""}, 2 * time.Second}}, &cri.ExecSyncResponse{Stdout: []byte("o\xff"), Stderr: []byte("e"), ExitCode: 3}},
		{"UpdateRuntimeConfig", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.runtime.UpdateRuntimeConfig(ctx, &cri.UpdateRuntimeConfigRequest{RuntimeConfig: &cri.RuntimeConfig{
				NetworkConfig: &cri.NetworkConfig{PodCidr: "10.0.0.0/24,fd00::/64"}}})
		}, call{"SetPodCIDR", []any{"10.0.0.0/24,fd00::/64"}}, &cri.UpdateRuntimeConfigResponse{}},
		{"PullImage", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.image.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "web:1"}, Auth: someAuth(), SandboxConfig: sandbox})
		}, call{"PullImage", []any{storage.PullRequest{Image: "web:1", Auth: someAuth(), Namespace: sandbox.Metadata.Namespace}}}, &cri.PullImageResponse{ImageRef: idOf(9)}},
		{"RemoveImage", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.image.RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: "web:1"}})
		}, call{"RemoveImage", []any{"web:1"}}, &cri.RemoveImageResponse{}},
		{"PullSecurityProfile", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.image.PullSecurityProfile(ctx, &cri.PullSecurityProfileRequest{
				Image: &cri.ImageSpec{Image: "r.example/p@sha256:1"}, Auth: someAuth(), SandboxConfig: sandbox, ProfileKind: cri.SecurityProfileKind_Seccomp,
			})
		}, call{"PullSecurityProfile", []any{storage.PullRequest{Image: "r.example/p@sha256:1", Auth: someAuth(), Namespace: sandbox.Metadata.Namespace}}}, &cri.PullSecurityProfileResponse{Cached: true}},
		{"RemoveSecurityProfile", func(ctx context.Context, n *node) (proto.Message, error) {
			return n.image.RemoveSecurityProfile(ctx, &cri.RemoveSecurityProfileRequest{Digest: "sha256:1"})
		}, call{"RemoveSecurityProfile", []any{"sha256:1"}}, &cri.RemoveSecurityProfileResponse{}},
	}
}

func someAuth() *cri.AuthConfig {
	return &cri.AuthConfig{Username: "u", Password: "p", Auth: "a", ServerAddress: "s", IdentityToken: "i", RegistryToken: "r"}
}

// same compares arguments; messages lose their Go identity on the wire.
func same(a, b any) bool {
	if m, ok := a.(proto.Message); ok {
		other, ok := b.(proto.Message)
		return ok && proto.Equal(m, other)
	}
	if p, ok := a.(storage.PullRequest); ok {
		other, ok := b.(storage.PullRequest)
		return ok && proto.Equal(p.Auth, other.Auth) && p.Image == other.Image && p.Namespace == other.Namespace
	}
	return reflect.DeepEqual(a, b)
}

// lastCall returns the latest call of either fake.
func (n *node) lastCall() call {
	if c := n.engine.last(); c.verb != "" {
		n.images.last()
		return c
	}
	return n.images.last()
}

func TestRPCsReachTheEngineAndTheStore(t *testing.T) {
	t.Parallel()
	n := start(t)
	for _, v := range verbs() {
		resp, err := v.do(t.Context(), n)
		if err != nil {
			t.Errorf("%s: %v", v.name, err)
			continue
		}
		if !proto.Equal(resp, v.resp) {
			t.Errorf("%s: response %v, want %v", v.name, resp, v.resp)
		}
		got := n.lastCall()
		if got.verb != v.want.verb || len(got.args) != len(v.want.args) {
			t.Errorf("%s: called %v, want %v", v.name, got, v.want)
			continue
		}
		for i := range got.args {
			if !same(got.args[i], v.want.args[i]) {
				t.Errorf("%s: argument %d is %v, want %v", v.name, i, got.args[i], v.want.args[i])
			}
		}
	}
}

func TestVerbsTranslateErrors(t *testing.T) {
	t.Parallel()
	n := start(t)
	cause := fmt.Errorf("step of the floor below: %w", fault.Precondition)
	n.engine.failing(cause)
	n.images.failing(cause)
	for _, v := range verbs() {
		_, err := v.do(t.Context(), n)
		wantCode(t, err, codes.FailedPrecondition)
		if status.Convert(err).Message() != "step of the floor below" {
			t.Errorf("%s: message %q", v.name, status.Convert(err).Message())
		}
	}
}

// CRI requires Stop and Remove to succeed on missing objects; critest invents
// UUIDs for that. Impossible ids never reach the engine.
func TestIDsThatCannotBe(t *testing.T) {
	t.Parallel()
	n := start(t)
	ctx := t.Context()
	for _, id := range []string{
		"f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "non-existent-id", idOf(1) + "0", strings.ToUpper("abcdef"),
		"../../etc", "a b", "\x00", "k8s_web", strings.Repeat("x", 1<<20),
	} {
		for name, err := range map[string]error{
			"StopPodSandbox":   second(n.runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id})),
			"RemovePodSandbox": second(n.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id})),
			"StopContainer":    second(n.runtime.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: id})),
			"RemoveContainer":  second(n.runtime.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: id})),
		} {
			if err != nil {
				t.Errorf("%s(%.40q): %v", name, id, err)
			}
		}
		for _, err := range []error{
			second(n.runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id})),
			second(n.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id})),
			second(n.runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: id})),
			second(n.runtime.ReopenContainerLog(ctx, &cri.ReopenContainerLogRequest{ContainerId: id})),
			second(n.runtime.UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{ContainerId: id, Linux: &cri.LinuxContainerResources{}})),
		} {
			if code := status.Code(err); code != codes.NotFound && !(strings.Contains(id, "\x00") && code == codes.InvalidArgument) {
				t.Errorf("id %.40q: %v", id, err)
			}
			if len(err.Error()) > 300 {
				t.Errorf("error quotes %d bytes", len(err.Error()))
			}
		}
	}
	if got := n.engine.last(); got.verb != "" {
		t.Errorf("the engine was asked: %v", got)
	}
}

func second[T any](_ T, err error) error { return err }

func TestEmptyIDsAreInvalid(t *testing.T) {
	t.Parallel()
	n := start(t)
	ctx := t.Context()
	for _, err := range []error{
		second(n.runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{})),
		second(n.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{})),
		second(n.runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{})),
		second(n.runtime.CreateContainer(ctx, &cri.CreateContainerRequest{Config: maximalContainerConfig()})),
		second(n.runtime.StartContainer(ctx, &cri.StartContainerRequest{})),
		second(n.runtime.StopContainer(ctx, &cri.StopContainerRequest{})),
		second(n.runtime.RemoveContainer(ctx, &cri.RemoveContainerRequest{})),
		second(n.runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{})),
		second(n.runtime.ReopenContainerLog(ctx, &cri.ReopenContainerLogRequest{})),
		second(n.runtime.ExecSync(ctx, &cri.ExecSyncRequest{Cmd: []string{"true"}})),
	} {
		wantCode(t, err, codes.InvalidArgument)
		if !strings.Contains(status.Convert(err).Message(), "_id is empty; send the ID that crius returned") {
			t.Errorf("message %q", status.Convert(err).Message())
		}
	}
}

// Requests without any content must be refused, not crash.
func TestEmptyRequests(t *testing.T) {
	t.Parallel()
	n := start(t)
	ctx := t.Context()
	for field, err := range map[string]error{
		"config.metadata":  second(n.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{})),
		"config.metadata ": second(n.runtime.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: idOf(1)})),
		"linux":            second(n.runtime.UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{ContainerId: idOf(1)})),
		"cmd":              second(n.runtime.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: idOf(1)})),
		"image.image":      second(n.image.PullImage(ctx, &cri.PullImageRequest{})),
		"image.image ":     second(n.image.ImageStatus(ctx, &cri.ImageStatusRequest{})),
		"image.image i":    second(n.image.RemoveImage(ctx, &cri.RemoveImageRequest{})),
	} {
		wantCode(t, err, codes.InvalidArgument)
		if !strings.HasPrefix(status.Convert(err).Message(), field) {
			t.Errorf("%s: message %q", field, status.Convert(err).Message())
		}
	}
	if _, err := n.runtime.UpdateRuntimeConfig(ctx, &cri.UpdateRuntimeConfigRequest{}); err != nil {
		t.Errorf("an empty runtime config must be ignored: %v", err)
	}
	if got := n.lastCall(); got.verb != "" {
		t.Errorf("the floor below was asked: %v", got)
	}
}

func TestTimeouts(t *testing.T) {
	t.Parallel()
	n := start(t)
	ctx := t.Context()
	wantCode(t, second(n.runtime.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: idOf(2), Timeout: -1})), codes.InvalidArgument)
	wantCode(t, second(n.runtime.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: idOf(2), Cmd: []string{"x"}, Timeout: -1})), codes.InvalidArgument)

	if _, err := n.runtime.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: idOf(2), Timeout: math.MaxInt64}); err != nil {
		t.Fatal(err)
	}
	if got := n.engine.last().args[1]; got != time.Duration(math.MaxInt64) {
		t.Errorf("a grace period of %d s became %v", int64(math.MaxInt64), got)
	}
}

func TestPodCIDR(t *testing.T) {
	t.Parallel()
	n := start(t)
	for cidr, ok := range map[string]bool{
		"10.0.0.0/24": true, "fd00::/64": true, "10.0.0.0/24,fd00::/64": true,
		"10.0.0.0": false, "10.0.0.0/33": false, ",": false, "10.0.0.0/24,": false, "10.0.0.0/24 fd00::/64": false,
		"10.0.0.0/24,10.1.0.0/24,10.2.0.0/24": false, "{{template}}": false,
	} {
		_, err := n.runtime.UpdateRuntimeConfig(t.Context(), &cri.UpdateRuntimeConfigRequest{RuntimeConfig: &cri.RuntimeConfig{
			NetworkConfig: &cri.NetworkConfig{PodCidr: cidr}}})
		if (err == nil) != ok {
			t.Errorf("%q: %v", cidr, err)
		}
	}
}

// A message of the size that clients accept carries both streams; CVE-2022-1708
// bounds each at 16 MiB.
func TestExecOutputFitsAMessage(t *testing.T) {
	t.Parallel()
	n := start(t)
	const full = clientMessageSize
	for _, c := range []struct{ out, err, wantOut, wantErr int }{
		{10, 20, 10, 20},
		{full, 0, full - messageOverhead, 0},
		{0, full, 0, full - messageOverhead},
		{full, 100, full - messageOverhead - 100, 100},
		{100, full, 100, full - messageOverhead - 100},
		{full, full, full/2 - messageOverhead/2, full/2 - messageOverhead/2},
	} {
		n.engine.exec = oci.ExecResult{Stdout: make([]byte, c.out), Stderr: make([]byte, c.err), ExitCode: 4}
		resp, err := n.runtime.ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: idOf(2), Cmd: []string{"yes"}})
		if err != nil {
			t.Errorf("%d+%d bytes: %v", c.out, c.err, err)
			continue
		}
		if len(resp.Stdout) != c.wantOut || len(resp.Stderr) != c.wantErr || resp.ExitCode != 4 {
			t.Errorf("%d+%d bytes: got %d+%d, want %d+%d", c.out, c.err, len(resp.Stdout), len(resp.Stderr), c.wantOut, c.wantErr)
		}
	}
}

// The limits of a call for a checkpoint are refused before anything is looked up.
func TestCheckpointRequests(t *testing.T) {
	t.Parallel()
	for location, good := range map[string]bool{
		"/var/lib/kubelet/checkpoints/checkpoint-p_ns-c-2026-11-28T18:00:00Z.tar": true,
		"": false, "a.tar": false, "/": false, "/a/": false, "/a/../b": false, "/a/b\x00c": false, "/" + strings.Repeat("a", 4096): false,
	} {
		err := checkCheckpointContainer(&cri.CheckpointContainerRequest{ContainerId: idOf(2), Location: location})
		if (err == nil) != good {
			t.Errorf("location %.60q: %v", location, err)
		}
	}
	limited, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	pod := func(change func(*cri.CheckpointPodRequest)) *cri.CheckpointPodRequest {
		r := &cri.CheckpointPodRequest{PodSandboxId: idOf(1), OutputPath: "/out", ContainerIds: []string{idOf(2), idOf(3)}}
		change(r)
		return r
	}
	if err := checkCheckpointPod(limited, pod(func(*cri.CheckpointPodRequest) {})); err != nil {
		t.Error(err)
	}
	wantCode(t, statusOf(checkCheckpointPod(context.Background(), pod(func(*cri.CheckpointPodRequest) {}))), codes.InvalidArgument)
	for _, change := range []func(*cri.CheckpointPodRequest){
		func(r *cri.CheckpointPodRequest) { r.ContainerIds = nil },
		func(r *cri.CheckpointPodRequest) { r.ContainerIds[1] = r.ContainerIds[0] },
		func(r *cri.CheckpointPodRequest) { r.OutputPath = "out" },
		func(r *cri.CheckpointPodRequest) { r.OutputPath = "/" },
		func(r *cri.CheckpointPodRequest) { r.Options = map[string]string{"tcp-close": "true"} },
	} {
		wantCode(t, statusOf(checkCheckpointPod(limited, pod(change))), codes.InvalidArgument)
	}
}

// So are those of a call that restores a pod.
func TestRestoreRequests(t *testing.T) {
	t.Parallel()
	limited, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	container := func(name string) *cri.ContainerConfig {
		return &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: "i"}}
	}
	request := func(change func(*cri.RestorePodRequest)) *cri.RestorePodRequest {
		r := &cri.RestorePodRequest{
			CheckpointPath: "/checkpoint", ContainerConfigs: []*cri.ContainerConfig{container("a"), container("b")},
			Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "p", Namespace: "n", Uid: "u"}},
		}
		change(r)
		return r
	}
	unchanged := request(func(*cri.RestorePodRequest) {})
	digest := request(func(r *cri.RestorePodRequest) {
		r.Options = map[string]string{pod.OptionManifest: strings.Repeat("ab", 32)}
	})
	if err := errors.Join(checkRestorePod(limited, unchanged), checkRestorePod(limited, digest)); err != nil {
		t.Error(err)
	}
	wantCode(t, statusOf(checkRestorePod(context.Background(), unchanged)), codes.InvalidArgument)
	for name, change := range map[string]func(*cri.RestorePodRequest){
		"no containers":   func(r *cri.RestorePodRequest) { r.ContainerConfigs = nil },
		"many containers": func(r *cri.RestorePodRequest) { r.ContainerConfigs = make([]*cri.ContainerConfig, maxRestored+1) },
		"nil container":   func(r *cri.RestorePodRequest) { r.ContainerConfigs[1] = nil },
		"no name":         func(r *cri.RestorePodRequest) { r.ContainerConfigs[1].Metadata = nil },
		"name twice":      func(r *cri.RestorePodRequest) { r.ContainerConfigs[1].Metadata.Name = "a" },
		"no image":        func(r *cri.RestorePodRequest) { r.ContainerConfigs[1].Image = nil },
		"no pod":          func(r *cri.RestorePodRequest) { r.Config = nil },
		"no path":         func(r *cri.RestorePodRequest) { r.CheckpointPath = "" },
		"relative path":   func(r *cri.RestorePodRequest) { r.CheckpointPath = "a" },
		"detour":          func(r *cri.RestorePodRequest) { r.CheckpointPath = "/a/../b" },
		"option":          func(r *cri.RestorePodRequest) { r.Options = map[string]string{"tcp-close": "true"} },
		"short digest":    func(r *cri.RestorePodRequest) { r.Options = map[string]string{pod.OptionManifest: "00"} },
		"upper case": func(r *cri.RestorePodRequest) {
			r.Options = map[string]string{pod.OptionManifest: strings.Repeat("AA", 32)}
		},
	} {
		if code := codeOf(checkRestorePod(limited, request(change))); code != codes.InvalidArgument {
			t.Errorf("%s: %s", name, code)
		}
	}
}

// The work continues in its flight; only the caller stops waiting.
func TestCancelledCaller(t *testing.T) {
	t.Parallel()
	n := start(t)
	waiting := make(chan struct{})
	n.engine.hook = func(ctx context.Context, _ string) error {
		close(waiting)
		<-ctx.Done()
		return fmt.Errorf("wait for the pod: %w", ctx.Err())
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-waiting; cancel() }()
	_, err := n.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: maximalSandboxConfig()})
	wantCode(t, err, codes.Canceled)
}

func TestCreateFaults(t *testing.T) {
	t.Parallel()
	refused := fmt.Errorf("no key: %w: %w", storage.ErrSignature, fault.Denied)
	for _, c := range []struct {
		err  error
		code codes.Code
		text string
	}{
		{refused, codes.Unknown, "SignatureValidationFailed: no key: signature policy"},
		{fmt.Errorf("%w at /v: %w", pod.ErrImageVolume, refused), codes.Unknown, "ImageVolumeMountFailed: SignatureValidationFailed: image volume at /v: no key: signature policy"},
		{fmt.Errorf("%w at /v: %w", pod.ErrImageVolume, fault.NotFound), codes.NotFound, "ImageVolumeMountFailed: image volume at /v"},
		{fmt.Errorf("image: %w", fault.NotFound), codes.NotFound, "image"},
	} {
		err := statusOf(createFault(c.err))
		wantCode(t, err, c.code)
		if got := status.Convert(err).Message(); got != c.text {
			t.Errorf("message %q, want %q", got, c.text)
		}
	}
}

func TestPullFaults(t *testing.T) {
	t.Parallel()
	n := start(t)
	for _, c := range []struct {
		err  error
		code codes.Code
		text string
	}{
		// The kubelet strips code Unknown only, then looks at the first word.
		{fmt.Errorf("connect: %w", fault.Unavailable), codes.Unknown, "RegistryUnavailable: connect"},
		{fmt.Errorf("%w: %w", storage.ErrWorkerDied, fault.Unavailable), codes.Unavailable, "pull worker died"},
		{fmt.Errorf("%w: no key: %w", storage.ErrSignature, fault.Denied), codes.Unknown, "SignatureValidationFailed: signature policy: no key"},
		{fmt.Errorf("%w: no policy: %w", storage.ErrSignature, fault.Unavailable), codes.Unknown, "SignatureValidationFailed: signature policy: no policy"},
		{fmt.Errorf("private: %w", fault.Denied), codes.PermissionDenied, "private"},
		{fmt.Errorf("login: %w", fault.Unauthenticated), codes.Unauthenticated, "login"},
		{fmt.Errorf("manifest: %w", fault.NotFound), codes.NotFound, "manifest"},
		{errors.New("odd"), codes.Unknown, "odd"},
	} {
		n.images.failing(c.err)
		_, err := n.image.PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "web"}})
		wantCode(t, err, c.code)
		if got := status.Convert(err).Message(); got != c.text {
			t.Errorf("message %q, want %q", got, c.text)
		}
	}
}

func TestPullHandler(t *testing.T) {
	t.Parallel()
	n := start(t)
	pull := func(handler string) error {
		_, err := n.image.PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "web", RuntimeHandler: handler}})
		return err
	}
	if err := errors.Join(pull(""), pull("crun")); err != nil {
		t.Error(err)
	}
	err := pull("kata")
	wantCode(t, err, codes.InvalidArgument)
	if !strings.Contains(err.Error(), `"crun" "runc"`) {
		t.Errorf("the handlers that exist are not named: %v", err)
	}
}
