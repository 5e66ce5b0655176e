package scene

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/images/facts"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/wait"
)

// Pod is a running pod, with its requested configuration.
type Pod struct {
	World   *World
	ID      string
	Handler string
	Config  *cri.PodSandboxConfig
	made    []string // ids of the pod and of its containers
}

// Container is a container of a pod, with its requested configuration.
type Container struct {
	Pod    *Pod
	ID     string
	Config *cri.ContainerConfig
}

type (
	// PodChange changes the request for a plain pod.
	PodChange = func(*cri.PodSandboxConfig)
	// ContainerChange is the same for a plain container.
	ContainerChange = func(*cri.ContainerConfig)
)

// PodConfig returns the configuration of a pod named after the test.
func (w *World) PodConfig(t *testing.T, change ...PodChange) *cri.PodSandboxConfig {
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(t.Name()))
	change = append([]PodChange{kubelet.LogsBelow(w.Path("logs"))}, change...)
	return kubelet.Pod(strings.Trim(name[:min(len(name), 60)], "-"), change...)
}

// Pod makes a pod that is removed without a trace when the test ends.
func (w *World) Pod(t *testing.T, handler string, change ...PodChange) *Pod {
	t.Helper()
	p, err := w.TryPod(t, handler, change...)
	if err != nil {
		t.Fatalf("RunPodSandbox: %v", err)
	}
	return p
}

// TryPod is Pod for a request that may be refused.
func (w *World) TryPod(t *testing.T, handler string, change ...PodChange) (*Pod, error) {
	t.Helper()
	config := w.PodConfig(t, change...)
	resp, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
	if err != nil {
		return nil, err
	}
	return w.Adopt(t, handler, resp.PodSandboxId, config), nil
}

// Adopt takes over a pod that the test has made itself.
func (w *World) Adopt(t *testing.T, handler, id string, config *cri.PodSandboxConfig) *Pod {
	t.Helper()
	p := &Pod{World: w, ID: id, Handler: handler, Config: config, made: []string{id}}
	t.Cleanup(func() { p.vanish(t) })
	return p
}

// vanish removes the pod; nothing of it may be left at the node's end.
func (p *Pod) vanish(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	if t.Failed() {
		t.Logf("the server's log about the pod:\n%s", p.World.LogAbout(20, p.made...))
	}
	if _, err := p.World.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.ID}); err != nil {
		t.Errorf("StopPodSandbox at the end: %v", err)
	}
	if _, err := p.World.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.ID}); err != nil {
		t.Errorf("RemovePodSandbox at the end: %v", err)
	}
	_ = os.RemoveAll(p.Config.LogDirectory)
	p.World.Gone(t, p.made...)
}

// Traces returns everything on the node that has the id of the pod or of one of
// its containers in its name.
func (p *Pod) Traces(t *testing.T) []string {
	t.Helper()
	now, err := p.World.Inventory()
	if err != nil {
		t.Fatal(err)
	}
	return now.About(p.made...)
}

// Untouched checks that f leaves nothing new with the pod's id, as required of
// a refused request.
func (p *Pod) Untouched(t *testing.T, f func()) {
	t.Helper()
	before := p.Traces(t)
	f()
	p.NothingBut(t, before)
}

// NothingBut checks that the pod has no traces except these.
func (p *Pod) NothingBut(t *testing.T, before []string) {
	t.Helper()
	var left []string
	if !wait.Until(t.Context(), func() bool {
		left = inventory.Beyond(before, p.Traces(t))
		return len(left) == 0
	}) {
		t.Errorf("left over in pod %s:\n%s", p.ID, inventory.Brief("", left))
	}
}

// Status calls PodSandboxStatus.
func (p *Pod) Status(t *testing.T) *cri.PodSandboxStatus {
	t.Helper()
	resp, err := p.World.Runtime().PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: p.ID})
	if err != nil {
		t.Fatalf("PodSandboxStatus: %v", err)
	}
	return resp.Status
}

// Stop calls StopPodSandbox.
func (p *Pod) Stop(t *testing.T) {
	t.Helper()
	if _, err := p.World.Runtime().StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: p.ID}); err != nil {
		t.Fatalf("StopPodSandbox: %v", err)
	}
}

// Remove calls RemovePodSandbox.
func (p *Pod) Remove(t *testing.T) {
	t.Helper()
	if _, err := p.World.Runtime().RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: p.ID}); err != nil {
		t.Fatalf("RemovePodSandbox: %v", err)
	}
}

// Steps returns the command line of a probe: words, with ";" between steps.
func Steps(line string) []string { return strings.Fields(line) }

// Try calls CreateContainer and returns its error; line is what the probe does,
// and the container has a name that no other container of the pod has.
func (p *Pod) Try(ctx context.Context, line string, change ...ContainerChange) (*Container, error) {
	config := kubelet.Container(fmt.Sprintf("c%d", len(p.made)), images.Probe, Steps(line), change...)
	resp, err := p.World.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: p.ID, Config: config, SandboxConfig: p.Config,
	})
	if err != nil {
		return nil, err
	}
	return p.Adopt(resp.ContainerId, config), nil
}

// Adopt takes over a container that the test has made itself.
func (p *Pod) Adopt(id string, config *cri.ContainerConfig) *Container {
	p.made = append(p.made, id)
	return &Container{Pod: p, ID: id, Config: config}
}

// Create creates a container.
func (p *Pod) Create(t *testing.T, line string, change ...ContainerChange) *Container {
	t.Helper()
	c, err := p.Try(t.Context(), line, change...)
	if err != nil {
		t.Fatalf("CreateContainer: %v", err)
	}
	return c
}

// Start creates and starts a container.
func (p *Pod) Start(t *testing.T, line string, change ...ContainerChange) *Container {
	t.Helper()
	c := p.Create(t, line, change...)
	c.Start(t)
	return c
}

// Finish runs a container to its end and returns what it wrote to stdout; its
// exit code must be 0.
func (p *Pod) Finish(t *testing.T, line string, change ...ContainerChange) string {
	t.Helper()
	c := p.Start(t, line, change...)
	if s := c.Wait(t); s.ExitCode != 0 {
		t.Fatalf("container %q ended with code %d, %s %s: %s", line, s.ExitCode, s.Reason, s.Message, c.Errors(t))
	}
	return c.Output(t)
}

// Facts runs a container that describes itself.
func (p *Pod) Facts(t *testing.T, change ...ContainerChange) *facts.Facts {
	t.Helper()
	f, err := facts.Parse([]byte(p.Finish(t, "facts", change...)))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// Start calls StartContainer.
func (c *Container) Start(t *testing.T) {
	t.Helper()
	if err := c.TryStart(t.Context()); err != nil {
		t.Fatalf("StartContainer: %v", err)
	}
}

// TryStart calls StartContainer and returns its error.
func (c *Container) TryStart(ctx context.Context) error {
	_, err := c.Pod.World.Runtime().StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.ID})
	return err
}

// Stop calls StopContainer with a grace period in seconds.
func (c *Container) Stop(t *testing.T, grace int64) {
	t.Helper()
	if _, err := c.Pod.World.Runtime().StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: c.ID, Timeout: grace}); err != nil {
		t.Fatalf("StopContainer: %v", err)
	}
}

// Remove calls RemoveContainer.
func (c *Container) Remove(t *testing.T) {
	t.Helper()
	if _, err := c.Pod.World.Runtime().RemoveContainer(t.Context(), &cri.RemoveContainerRequest{ContainerId: c.ID}); err != nil {
		t.Fatalf("RemoveContainer: %v", err)
	}
}

// Status calls ContainerStatus.
func (c *Container) Status(t *testing.T) *cri.ContainerStatus {
	t.Helper()
	resp, err := c.Pod.World.Runtime().ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: c.ID})
	if err != nil {
		t.Fatalf("ContainerStatus: %v", err)
	}
	return resp.Status
}

// Wait returns the status once the container has exited.
func (c *Container) Wait(t *testing.T) *cri.ContainerStatus {
	t.Helper()
	var s *cri.ContainerStatus
	wait.For(t, "the container to exit", func() bool { s = c.Status(t); return s.State == cri.ContainerState_CONTAINER_EXITED })
	return s
}

// Says waits until the container has written text to stdout.
func (c *Container) Says(t *testing.T, text string) {
	t.Helper()
	if !wait.Until(t.Context(), func() bool { return strings.Contains(c.Output(t), text) }) {
		t.Fatalf("container never wrote %q, but %q and %q", text, c.Output(t), c.Errors(t))
	}
}

// Log returns the records in the container's log file.
func (c *Container) Log(t *testing.T) []kubelet.LogRecord {
	t.Helper()
	return ReadLog(t, filepath.Join(c.Pod.Config.LogDirectory, c.Config.LogPath))
}

// ReadLog reads a log while a container may be writing it: if a record crosses
// the end of a page, a reader may see only its beginning at first.
func ReadLog(t *testing.T, file string) (records []kubelet.LogRecord) {
	t.Helper()
	var err error
	wait.Until(context.Background(), func() bool { records, err = kubelet.ReadLog(file); return !errors.Is(err, kubelet.ErrUnfinished) })
	if err != nil {
		t.Fatal(err)
	}
	return records
}

// Output returns what the container has written to stdout so far.
func (c *Container) Output(t *testing.T) string {
	t.Helper()
	return kubelet.Text(c.Log(t), "stdout")
}

// Errors returns what the container has written to stderr so far.
func (c *Container) Errors(t *testing.T) string {
	t.Helper()
	return kubelet.Text(c.Log(t), "stderr")
}

// Exec runs a probe inside, whose exit code must be 0, and returns its output.
func (c *Container) Exec(t *testing.T, line string) string {
	t.Helper()
	resp := c.ExecResult(t, append([]string{"/probe"}, Steps(line)...)...)
	if resp.ExitCode != 0 {
		t.Fatalf("exec %q ended with code %d: %s", line, resp.ExitCode, resp.Stderr)
	}
	return string(resp.Stdout)
}

// Last runs a probe inside that ends the container, and that may be killed with
// it before it has its own exit code.
func (c *Container) Last(t *testing.T, line string) {
	t.Helper()
	_, _ = c.Pod.World.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{
		ContainerId: c.ID, Cmd: append([]string{"/probe"}, Steps(line)...), Timeout: LimitSeconds,
	})
}

// Refuses runs a probe inside that must fail with words in its output.
func (c *Container) Refuses(t *testing.T, line string, words string) {
	t.Helper()
	resp := c.ExecResult(t, append([]string{"/probe"}, Steps(line)...)...)
	if resp.ExitCode == 0 || !strings.Contains(string(resp.Stderr), words) {
		t.Errorf("exec %q: code %d, %q and %q, want a failure with %q", line, resp.ExitCode, resp.Stdout, resp.Stderr, words)
	}
}

// ExecResult calls ExecSync for a command.
func (c *Container) ExecResult(t *testing.T, cmd ...string) *cri.ExecSyncResponse {
	t.Helper()
	resp, err := c.Pod.World.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: cmd, Timeout: LimitSeconds})
	if err != nil {
		t.Fatalf("ExecSync %q: %v", cmd, err)
	}
	return resp
}

// Facts asks a running container about itself.
func (c *Container) Facts(t *testing.T) *facts.Facts {
	t.Helper()
	f, err := facts.Parse([]byte(c.Exec(t, "facts")))
	if err != nil {
		t.Fatal(err)
	}
	return f
}
