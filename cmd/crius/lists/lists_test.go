package lists

import (
	"context"
	"encoding/json"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/test/kit/criserver"
)

// node has a pod of two attempts, a pod that is removed while it is listed, and containers of each
// state.
type node struct {
	cri.UnimplementedRuntimeServiceServer
}

func hoursAgo(n int) int64 { return time.Now().Add(-time.Duration(n) * time.Hour).UnixNano() }

func (node) ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	item := func(id, name string, attempt uint32, hours int) *cri.PodSandbox {
		return &cri.PodSandbox{Id: id, Metadata: &cri.PodSandboxMetadata{Namespace: "default", Name: name, Uid: "u", Attempt: attempt}, CreatedAt: hoursAgo(hours), RuntimeHandler: map[uint32]string{1: "kata"}[attempt]}
	}
	return &cri.ListPodSandboxResponse{Items: []*cri.PodSandbox{item("p0", "web", 0, 3), item("p1", "web", 1, 2), item("gone", "gone", 0, 1), item("p2", "db\x1b", 0, 1)}}, nil
}

func (node) PodSandboxStatus(_ context.Context, r *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error) {
	switch r.PodSandboxId {
	case "gone":
		return nil, status.Error(codes.NotFound, "gone")
	case "p1":
		return &cri.PodSandboxStatusResponse{Status: &cri.PodSandboxStatus{Network: &cri.PodSandboxNetworkStatus{Ip: "10.0.0.1", AdditionalIps: []*cri.PodIP{{Ip: "fd00::1"}}}}}, nil
	}
	return &cri.PodSandboxStatusResponse{Status: &cri.PodSandboxStatus{State: cri.PodSandboxState_SANDBOX_NOTREADY}}, nil
}

func (node) ListContainers(context.Context, *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	item := func(id, name string, state cri.ContainerState, hours int) *cri.Container {
		return &cri.Container{Id: id, PodSandboxId: "p1", Metadata: &cri.ContainerMetadata{Name: name}, State: state, CreatedAt: hoursAgo(hours), Image: &cri.ImageSpec{Image: "sha256:0", UserSpecifiedImage: "r.test/a:1"}}
	}
	return &cri.ListContainersResponse{Containers: []*cri.Container{
		item("c1", "main", cri.ContainerState_CONTAINER_EXITED, 2), item("c2", "main", cri.ContainerState_CONTAINER_RUNNING, 1),
		item("c3", "init", cri.ContainerState_CONTAINER_EXITED, 2), item("c4", "next", cri.ContainerState_CONTAINER_CREATED, 1),
	}}, nil
}

func (node) ContainerStatus(_ context.Context, r *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
	if r.ContainerId == "c3" {
		return &cri.ContainerStatusResponse{Status: &cri.ContainerStatus{Reason: "Completed"}}, nil
	}
	return &cri.ContainerStatusResponse{Status: &cri.ContainerStatus{ExitCode: 137, Reason: "OOMKilled"}}, nil
}

func (node) Status(context.Context, *cri.StatusRequest) (*cri.StatusResponse, error) {
	return &cri.StatusResponse{Info: map[string]string{"server": `{"checkpoints": [{"id": "c2", "podId": "p1"}]}`}}, nil
}

func run(t *testing.T, command func(cli.Load) *cobra.Command, args ...string) string {
	t.Helper()
	var out strings.Builder
	cmd := command(func(*cobra.Command) (*config.Loaded, error) {
		cfg := config.Default()
		cfg.API.Listen = criserver.Serve(t, node{}, nil)
		return &config.Loaded{Config: cfg}, nil
	})
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	minutes := regexp.MustCompile(`h\d+m\d+s`) // the listing may take its time
	return minutes.ReplaceAllString(regexp.MustCompile(` +`).ReplaceAllString(out.String(), " "), "h")
}

func TestPods(t *testing.T) {
	t.Parallel()
	const want = "POD ID STATE AGE ATTEMPT HANDLER ADDRESSES\n" +
		"default/db\\x1b p2 notready 1h 0 (default) -\n" +
		"default/web p1 ready 2h 1 kata 10.0.0.1,fd00::1\n" +
		"default/web p0 notready 3h 0 (default) -\n"
	if got := run(t, PodsCommand); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestContainers(t *testing.T) {
	t.Parallel()
	const heading = "POD CONTAINER ID STATE AGE IMAGE\n"
	if got, want := run(t, ContainersCommand), heading+"default/web main c2 running, being checkpointed 1h r.test/a:1\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	want := heading +
		"default/web init c3 exited 0 2h r.test/a:1\n" +
		"default/web main c2 running, being checkpointed 1h r.test/a:1\n" +
		"default/web main c1 exited 137, OOMKilled 2h r.test/a:1\n" +
		"default/web next c4 created 1h r.test/a:1\n"
	if got := run(t, ContainersCommand, "--all"); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestListsAsJSON(t *testing.T) {
	t.Parallel()
	var pods []pod
	var containers []container
	if err := json.Unmarshal([]byte(run(t, PodsCommand, "-o", "json")), &pods); err != nil || len(pods) != 3 || pods[1].Addresses[1] != "fd00::1" {
		t.Errorf("%v, %+v", err, pods)
	}
	if err := json.Unmarshal([]byte(run(t, ContainersCommand, "-a", "-o", "json")), &containers); err != nil || len(containers) != 4 || containers[2].Exit.Code != 137 {
		t.Errorf("%v, %+v", err, containers)
	}
}
