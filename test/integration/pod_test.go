package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images/facts"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// The kit for the tests of this package: a world runs pods, a pod runs
// containers, and tests wait for containers, read their output and query them.

type pod struct {
	w       *world
	id      string
	handler string
	config  *cri.PodSandboxConfig
	made    []string // ids of the pod and of its containers
}

type container struct {
	pod    *pod
	id     string
	config *cri.ContainerConfig
}

type (
	podChange       = func(*cri.PodSandboxConfig)
	containerChange = func(*cri.ContainerConfig)
)

// podConfig returns the configuration of a pod named after the test.
func (w *world) podConfig(t *testing.T, change ...podChange) *cri.PodSandboxConfig {
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(t.Name()))
	change = append([]podChange{kubelet.LogsBelow(w.Path("logs"))}, change...)
	return kubelet.Pod(strings.Trim(name[:min(len(name), 60)], "-"), change...)
}

// run makes a pod that is removed without a trace when the test ends.
func (w *world) run(t *testing.T, handler string, change ...podChange) *pod {
	t.Helper()
	p := &pod{w: w, handler: handler, config: w.podConfig(t, change...)}
	resp, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: p.config, RuntimeHandler: handler})
	if err != nil {
		t.Fatalf("RunPodSandbox: %v", err)
	}
	p.id, p.made = resp.PodSandboxId, []string{resp.PodSandboxId}
	t.Cleanup(func() { p.vanish(t) })
	return p
}

// vanish removes the pod; nothing of it may be left at the node's end.
func (p *pod) vanish(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	if t.Failed() {
		t.Logf("the server's log about the pod:\n%s", p.w.LogAbout(20, p.made...))
	}
	if _, err := p.w.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.id}); err != nil {
		t.Errorf("StopPodSandbox at the end: %v", err)
	}
	if _, err := p.w.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.id}); err != nil {
		t.Errorf("RemovePodSandbox at the end: %v", err)
	}
	os.RemoveAll(p.config.LogDirectory)
	p.w.Gone(t, p.made...)
}

func (p *pod) status(t *testing.T) *cri.PodSandboxStatus {
	t.Helper()
	resp, err := p.w.Runtime().PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: p.id})
	if err != nil {
		t.Fatalf("PodSandboxStatus: %v", err)
	}
	return resp.Status
}

func (p *pod) stop(t *testing.T) {
	t.Helper()
	if _, err := p.w.Runtime().StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: p.id}); err != nil {
		t.Fatalf("StopPodSandbox: %v", err)
	}
}

func (p *pod) remove(t *testing.T) {
	t.Helper()
	if _, err := p.w.Runtime().RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: p.id}); err != nil {
		t.Fatalf("RemovePodSandbox: %v", err)
	}
}

// steps returns the command line of a probe: words, with ";" between steps.
func steps(line string) []string { return strings.Fields(line) }

// try calls CreateContainer and returns its error; the container has the
// probe's arguments in args, and a name that no other container of the pod has.
func (p *pod) try(ctx context.Context, args []string, change ...containerChange) (*container, error) {
	name := fmt.Sprintf("c%d", len(p.made))
	config := kubelet.Container(name, probe, args, change...)
	resp, err := p.w.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: p.id, Config: config, SandboxConfig: p.config,
	})
	if err != nil {
		return nil, err
	}
	p.made = append(p.made, resp.ContainerId)
	return &container{pod: p, id: resp.ContainerId, config: config}, nil
}

func (p *pod) create(t *testing.T, line string, change ...containerChange) *container {
	t.Helper()
	c, err := p.try(t.Context(), steps(line), change...)
	if err != nil {
		t.Fatalf("CreateContainer: %v", err)
	}
	return c
}

// start creates and starts a container.
func (p *pod) start(t *testing.T, line string, change ...containerChange) *container {
	t.Helper()
	c := p.create(t, line, change...)
	c.start(t)
	return c
}

// finish runs a container to its end and returns what it wrote to stdout; its
// exit code must be 0.
func (p *pod) finish(t *testing.T, line string, change ...containerChange) string {
	t.Helper()
	c := p.start(t, line, change...)
	if s := c.wait(t); s.ExitCode != 0 {
		t.Fatalf("container %q ended with code %d, %s %s: %s", line, s.ExitCode, s.Reason, s.Message, kubelet.Text(c.log(t), "stderr"))
	}
	return c.output(t)
}

// facts runs a container that describes itself.
func (p *pod) facts(t *testing.T, change ...containerChange) *facts.Facts {
	t.Helper()
	f, err := facts.Parse([]byte(p.finish(t, "facts", change...)))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (c *container) start(t *testing.T) {
	t.Helper()
	if _, err := c.pod.w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id}); err != nil {
		t.Fatalf("StartContainer: %v", err)
	}
}

// stop calls StopContainer with a grace period in seconds.
func (c *container) stop(t *testing.T, grace int64) {
	t.Helper()
	if _, err := c.pod.w.Runtime().StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: c.id, Timeout: grace}); err != nil {
		t.Fatalf("StopContainer: %v", err)
	}
}

func (c *container) remove(t *testing.T) {
	t.Helper()
	if _, err := c.pod.w.Runtime().RemoveContainer(t.Context(), &cri.RemoveContainerRequest{ContainerId: c.id}); err != nil {
		t.Fatalf("RemoveContainer: %v", err)
	}
}

func (c *container) status(t *testing.T) *cri.ContainerStatus {
	t.Helper()
	resp, err := c.pod.w.Runtime().ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: c.id})
	if err != nil {
		t.Fatalf("ContainerStatus: %v", err)
	}
	return resp.Status
}

// wait returns the status once the container has exited.
func (c *container) wait(t *testing.T) *cri.ContainerStatus {
	t.Helper()
	var s *cri.ContainerStatus
	wait.For(t, "the container to exit", func() bool { s = c.status(t); return s.State == cri.ContainerState_CONTAINER_EXITED })
	return s
}

// says waits until the container has written text to stdout.
func (c *container) says(t *testing.T, text string) {
	t.Helper()
	if !wait.Until(t.Context(), func() bool { return strings.Contains(c.output(t), text) }) {
		t.Fatalf("container never wrote %q, but %q", text, c.output(t))
	}
}

func (c *container) logFile() string {
	return filepath.Join(c.pod.config.LogDirectory, c.config.LogPath)
}

func (c *container) log(t *testing.T) []kubelet.LogRecord {
	t.Helper()
	return scene.ReadLog(t, c.logFile())
}

func (c *container) output(t *testing.T) string {
	t.Helper()
	return kubelet.Text(c.log(t), "stdout")
}

// exec runs a probe inside, whose exit code must be 0, and returns its output.
func (c *container) exec(t *testing.T, line string) string {
	t.Helper()
	resp := c.execResult(t, line)
	if resp.ExitCode != 0 {
		t.Fatalf("exec %q ended with code %d: %s", line, resp.ExitCode, resp.Stderr)
	}
	return string(resp.Stdout)
}

func (c *container) execResult(t *testing.T, line string) *cri.ExecSyncResponse {
	t.Helper()
	resp, err := c.pod.w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
		ContainerId: c.id, Cmd: append([]string{"/probe"}, steps(line)...), Timeout: scene.LimitSeconds,
	})
	if err != nil {
		t.Fatalf("ExecSync %q: %v", line, err)
	}
	return resp
}

// facts asks a running container about itself.
func (c *container) facts(t *testing.T) *facts.Facts {
	t.Helper()
	f, err := facts.Parse([]byte(c.exec(t, "facts")))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// wantCode checks that a call was refused with a code and a message that
// contains each of the words.
func wantCode(t *testing.T, err error, code codes.Code, words ...string) {
	t.Helper()
	scene.WantCode(t, err, code, words...)
}

// equal compares two values and names what they are.
func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	scene.Equal(t, what, got, want)
}

func equalSlices[T comparable](t *testing.T, what string, got, want []T) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

func contains[T comparable](s []T, x T) bool { return slices.Contains(s, x) }

// unique returns s in ascending order without repetitions.
func unique(s []int) []int {
	s = slices.Clone(s)
	slices.Sort(s)
	return slices.Compact(s)
}

// only waits until the container has exactly that many processes.
func (c *container) only(t *testing.T, processes int) {
	t.Helper()
	var now []int
	if !wait.Until(t.Context(), func() bool { now = c.pod.w.processesOf(t, c.id); return len(now) == processes }) {
		t.Fatalf("the container has processes %v, want %d", now, processes)
	}
}
