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
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/storage/checkpoint"
	"github.com/crius-run/crius/test/kit/criserver"
)

// restoring has the pod default/web, and restores others as r1 with the container r2.
type restoring struct {
	criserver.OnePod
	cri.UnimplementedImageServiceServer
	asked    []string
	req      *cri.RestorePodRequest
	deadline bool
	missing  bool // the image
	fail     string
}

func (s *restoring) did(what string) error {
	s.asked = append(s.asked, what)
	if verb, _, _ := strings.Cut(what, " "); verb == s.fail {
		return errors.New("the disk is full")
	}
	return nil
}

func (s *restoring) RestorePod(ctx context.Context, r *cri.RestorePodRequest) (*cri.RestorePodResponse, error) {
	s.req = r
	_, s.deadline = ctx.Deadline()
	return &cri.RestorePodResponse{PodSandboxId: "r1", RestoredContainers: []*cri.RestoredContainer{{Name: "main", ContainerId: "r2"}}}, s.did("restore " + r.CheckpointPath)
}

func (s *restoring) StartContainer(_ context.Context, r *cri.StartContainerRequest) (*cri.StartContainerResponse, error) {
	return &cri.StartContainerResponse{}, s.did("start " + r.ContainerId)
}

func (s *restoring) RemovePodSandbox(_ context.Context, r *cri.RemovePodSandboxRequest) (*cri.RemovePodSandboxResponse, error) {
	return &cri.RemovePodSandboxResponse{}, s.did("remove " + r.PodSandboxId)
}

func (s *restoring) ImageStatus(_ context.Context, r *cri.ImageStatusRequest) (*cri.ImageStatusResponse, error) {
	if s.missing {
		return &cri.ImageStatusResponse{}, nil
	}
	return &cri.ImageStatusResponse{Image: &cri.Image{Id: r.Image.Image}}, nil
}

func (s *restoring) PullImage(_ context.Context, r *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	return &cri.PullImageResponse{}, s.did("pull " + r.Image.Image)
}

const request = `{"runtimeHandler": "runc", "config": {"metadata": {"name": "web", "namespace": "default", "uid": "old"}, "logDirectory": "/logs/default_web_old",
	"labels": {"io.kubernetes.pod.name": "web", "io.kubernetes.pod.uid": "old", "app": "web"}}, "containerConfigs": [{"metadata": {"name": "main"},
	"image": {"image": "web:1"}, "labels": {"io.kubernetes.pod.name": "web"}}]}`

// signedPod makes a checkpoint of the pod default/web with a request, which the key in keys has signed.
func signedPod(t *testing.T, keys, request string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(filepath.Join(dir, "c1"), 0o700))
	must(os.WriteFile(filepath.Join(dir, "c1", "spec.dump"), []byte("{}"), 0o600))
	target, err := checkpoint.OpenTarget(dir)
	must(err)
	defer target.Close()
	m := checkpoint.NewPodManifest(checkpoint.PodManifest{Containers: []checkpoint.PodPart{{ID: "c1", Name: "main", ImageID: "i1", ImageRef: "r.test/web@sha256:1", Directory: "c1"}}})
	if request != "" {
		must(target.PutRequest([]byte(request), ".tmp"))
		m.Request = checkpoint.Request
	}
	m.Files, err = target.Digests(t.Context())
	must(err)
	key, err := checkpoint.NodeKey(keys)
	must(err)
	must(target.PutManifest(m, key, ".tmp"))
	return dir
}

func restore(t *testing.T, s *restoring, root string, args ...string) (out, errs string, err error) {
	t.Helper()
	var stdout, stderr strings.Builder
	cmd := RestoreCommand(func(*cobra.Command) (*config.Loaded, error) {
		cfg := config.Default()
		cfg.API.Listen, cfg.Root = criserver.Serve(t, s, s), root
		return &config.Loaded{Config: cfg}, nil
	})
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetArgs(args)
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	err = cmd.ExecuteContext(t.Context())
	return stdout.String(), stderr.String(), err
}

// A pod is restored from what its checkpoint signs for, with the image of the checkpoint, under another name.
func TestRestore(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir := signedPod(t, root, request)
	s := new(restoring)
	out, _, err := restore(t, s, root, dir, "--name", "copy")
	if err != nil || out != "r1\n" || !slices.Equal(s.asked, []string{"restore " + dir, "start r2"}) || !s.deadline {
		t.Fatalf("%v, printed %q, asked %q, with a deadline: %v", err, out, s.asked, s.deadline)
	}
	c, m := s.req.Config, s.req.Config.Metadata
	if m.Name != "copy" || m.Namespace != "default" || len(m.Uid) != 36 || c.LogDirectory != "/logs/default_copy_"+m.Uid || s.req.RuntimeHandler != "runc" {
		t.Errorf("the pod is %v with logs in %s", m, c.LogDirectory)
	}
	if l := c.Labels; len(l) != 3 || l[labelName] != "copy" || l[labelUID] != m.Uid || l["app"] != "web" {
		t.Errorf("its labels are %v", l)
	}
	if c := s.req.ContainerConfigs[0]; c.Image.Image != "i1" || c.Labels[labelName] != "copy" {
		t.Errorf("the container is %v", c)
	}
	s = &restoring{missing: true}
	if _, progress, err := restore(t, s, root, dir, "--namespace", "other", "--start=false"); err != nil || !slices.Equal(s.asked, []string{"pull r.test/web@sha256:1", "restore " + dir}) || progress != "pulling r.test/web@sha256:1\n" {
		t.Errorf("held: %v, asked %q, showed %q", err, s.asked, progress)
	}
}

// What cannot be restored says why, and nothing is left.
func TestRestoreFails(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir := signedPod(t, root, request)
	for name, c := range map[string]struct {
		server restoring
		dir    string
		args   []string
		asked  []string
		want   string
	}{
		"no directory":     {dir: dir + "x", want: "no such file or directory"},
		"another key":      {dir: signedPod(t, t.TempDir(), request), want: "not signed by this node"},
		"older checkpoint": {dir: signedPod(t, root, ""), want: "does not have the requests of its pod and containers"},
		"later crius":      {dir: signedPod(t, root, strings.Replace(request, "labels", "later", 1)), want: "written by a later crius?"},
		"other containers": {dir: signedPod(t, root, strings.Replace(request, "main", "other", 1)), want: "other containers than the checkpoint"},
		"no time":          {dir: dir, args: []string{"--timeout", "0s"}, want: "give a second or more"},
		"existing pod":     {dir: dir, want: "pod default/web already exists as p1: remove it, or choose another name with --name"},
		"image":            {dir: dir, server: restoring{missing: true, fail: "pull"}, args: []string{"--name", "x"}, asked: []string{"pull r.test/web@sha256:1"}, want: "image of container main: the disk is full"},
		"restore":          {dir: dir, server: restoring{fail: "restore"}, args: []string{"--name", "x"}, asked: []string{"restore " + dir}, want: "the disk is full"},
		"start":            {dir: dir, server: restoring{fail: "start"}, args: []string{"--name", "x"}, asked: []string{"restore " + dir, "start r2", "remove r1"}, want: "start container main: the disk is full"},
	} {
		out, _, err := restore(t, &c.server, root, append([]string{c.dir}, c.args...)...)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "rpc error") || out != "" || !slices.Equal(c.server.asked, c.asked) {
			t.Errorf("%s: %v, want %q; printed %q, asked %q", name, err, c.want, out, c.server.asked)
		}
	}
}
