package checkpoint

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/test/kit/criserver"
)

// server has the pod default/web with a running container and one that has exited. A checkpoint ends when
// its progress has been asked for twice.
type server struct {
	criserver.OnePod
	asked chan string // requests
	told  chan struct{}
	err   error
}

func (s *server) ListContainers(context.Context, *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	container := func(id, name string, state cri.ContainerState) *cri.Container {
		return &cri.Container{Id: id, PodSandboxId: "p1", Metadata: &cri.ContainerMetadata{Name: name}, State: state}
	}
	return &cri.ListContainersResponse{Containers: []*cri.Container{
		container("c1", "main", cri.ContainerState_CONTAINER_RUNNING), container("c2", "init", cri.ContainerState_CONTAINER_EXITED),
	}}, nil
}

func (s *server) Status(context.Context, *cri.StatusRequest) (*cri.StatusResponse, error) {
	select {
	case s.told <- struct{}{}:
	default:
	}
	return &cri.StatusResponse{Info: map[string]string{"server": `{"work": [
		{"operation": "exec", "object": "c1"},
		{"operation": "checkpoint", "object": "c1", "seconds": 2, "step": "dump container", "waitsFor": "criu"},
		{"operation": "checkpoint pod", "object": "p1", "seconds": 3, "step": "freeze containers"},
		{"operation": "checkpoint", "object": "c9", "step": "of another"}]}`}}, nil
}

func (s *server) write(request string) error {
	s.asked <- request
	if s.err == nil {
		<-s.told
		<-s.told
	}
	return s.err
}

func (s *server) CheckpointContainer(_ context.Context, r *cri.CheckpointContainerRequest) (*cri.CheckpointContainerResponse, error) {
	return &cri.CheckpointContainerResponse{}, s.write(r.ContainerId + " " + r.Location)
}

func (s *server) CheckpointPod(ctx context.Context, r *cri.CheckpointPodRequest) (*cri.CheckpointPodResponse, error) {
	if _, ok := ctx.Deadline(); !ok {
		return nil, errors.New("no deadline")
	}
	return &cri.CheckpointPodResponse{}, s.write(r.PodSandboxId + " " + r.OutputPath + " " + strings.Join(r.ContainerIds, ","))
}

// run returns the output, the progress and what the server was asked.
func run(t *testing.T, s *server, args ...string) (out, progress string, asked []string, err error) {
	t.Helper()
	s.asked, s.told = make(chan string, 1), make(chan struct{}, 2)
	var stdout, stderr strings.Builder
	cmd := Command(func(*cobra.Command) (*config.Loaded, error) {
		cfg := config.Default()
		cfg.API.Listen = criserver.Serve(t, s, nil)
		return &config.Loaded{Config: cfg}, nil
	})
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetArgs(args)
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	err = cmd.ExecuteContext(t.Context())
	close(s.asked)
	for a := range s.asked {
		asked = append(asked, a)
	}
	return stdout.String(), stderr.String(), asked, err
}

// A container becomes an archive, a pod a directory with its running containers. What the server does is
// shown, a line for each step.
func TestCheckpoint(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for _, c := range []struct {
		args            []string
		asked, progress string
		path            string
	}{
		{[]string{"web", "main", "--output", "x.tar"}, "c1 " + dir + "/x.tar", "checkpoint: dump container, waits for criu, for 2s\n", dir + "/x.tar"},
		{[]string{"default/web", "--output", dir + "/new"}, "p1 " + dir + "/new c1", "checkpoint pod: freeze containers, for 3s\n", dir + "/new"},
	} {
		out, progress, asked, err := run(t, new(server), c.args...)
		if err != nil || !slices.Equal(asked, []string{c.asked}) || out != c.path+"\n" || !strings.HasPrefix(progress, c.progress) {
			t.Errorf("%q: %v, asked %q, printed %q, showed %q", c.args, err, asked, out, progress)
		}
	}
	if info, err := os.Stat(filepath.Join(dir, "new")); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info, err)
	}
	out, _, _, err := run(t, new(server), "web", "main")
	if name := filepath.Base(out); err != nil || filepath.Dir(out) != dir || !strings.HasPrefix(name, "checkpoint-web_default-main-2") || !strings.HasSuffix(name, "Z.tar\n") {
		t.Errorf("without a path: %q, %v", out, err)
	}
}

// What fails says why, and leaves no directory.
func TestCheckpointFails(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"web"}, "the disk is full"},
		{[]string{"web", "main"}, "the disk is full"},
		{[]string{"other"}, `no pod "other"`},
		{[]string{"web", "other"}, `no container "other"`},
		{[]string{"web", "--timeout", "0s"}, "--timeout is 0s: give a second or more"},
		{[]string{"web", "main", "--output", "dir/"}, "give the path of a file that does not exist"},
		{[]string{"web", "--output", "no/such/dir"}, "no such file or directory"},
	} {
		out, _, _, err := run(t, &server{err: status.Error(codes.ResourceExhausted, "the disk is full")}, c.args...)
		if err == nil || !strings.Contains(err.Error(), c.want) || out != "" {
			t.Errorf("%q: %v, printed %q, want %q", c.args, err, out, c.want)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
