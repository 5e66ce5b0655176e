package integration

import (
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// brittle is a node whose handler "brittle" is a runtime that can be told to
// fail, and whose handler "hasty" is the same with a time-out short enough for
// a test, which a busy machine may reach.
func brittle(t *testing.T, real string) (*world, *faulty) {
	t.Helper()
	w := private(t, node.Options{Config: `[runtime.handlers.brittle]
path = "{{.Path "brittle" "runtime"}}"

[runtime.handlers.hasty]
path = "{{.Path "brittle" "runtime"}}"
create_timeout = "3s"
`})
	path, err := exec.LookPath(real)
	if err != nil {
		t.Fatal(err)
	}
	runtime := install(t, w.Path("brittle"), "runtime", path)
	if err := w.settle(t.Context(), "brittle"); err != nil {
		t.Fatal(err)
	}
	return w, runtime
}

// runs creates, runs and removes a container, as often as a hasty handler
// needs.
func (p *pod) runs(t *testing.T) {
	t.Helper()
	var c *container
	var err error
	wait.For(t, "a container to be made in time", func() bool {
		c, err = p.try(t.Context(), steps("echo runs"))
		return status.Code(err) != codes.DeadlineExceeded
	})
	if err != nil {
		t.Fatalf("the retry: %v", err)
	}
	c.start(t)
	equal(t, "exit code of the retry", c.wait(t).ExitCode, 0)
	c.remove(t)
	p.w.Gone(t, c.id)
	p.made = p.made[:1]
}

func TestNameIsFreeAfterAFailedCreate_crio_9097(t *testing.T) {
	t.Parallel()
	w, runtime := brittle(t, "runc")
	pods := map[string]*pod{"brittle": w.run(t, "brittle"), "hasty": w.run(t, "hasty")}
	pods["hasty"].runs(t)
	before := mustInventory(t, w)
	for _, c := range []struct{ handler, words, says string }{
		{"brittle", "after half done", "half done"}, // the container exists by then
		{"brittle", "die", "killed by signal 9"},
		{"brittle", "garbage", "reports success"},
		{"hasty", "hangafter", "did not create the container within 3s"},
	} {
		t.Run(c.words, func(t *testing.T) {
			p := pods[c.handler]
			runtime.does(t, "create", c.words)
			_, err := p.try(t.Context(), steps("sleep"))
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("CreateContainer: %v, want an error that says %q", err, c.says)
			}
			runtime.heal(t)
			w.Restored(t, before)
			p.runs(t)
		})
	}
}

func TestRuntimeThatFailsLater(t *testing.T) {
	t.Parallel()
	w, runtime := brittle(t, "crun")
	start := func(c *container) error {
		_, err := w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id})
		return err
	}
	t.Run("start fails", func(t *testing.T) {
		c := w.run(t, "brittle").create(t, "sleep")
		runtime.does(t, "start", "fail will not start")
		if err := start(c); err == nil || !strings.Contains(err.Error(), "will not start") {
			t.Errorf("StartContainer: %v", err)
		}
		runtime.heal(t)
		if s := c.status(t).State; s != cri.ContainerState_CONTAINER_EXITED && s != cri.ContainerState_CONTAINER_CREATED {
			t.Errorf("state is %v", s)
		}
	})
	t.Run("start dies", func(t *testing.T) {
		c := w.run(t, "brittle").create(t, "sleep")
		runtime.does(t, "start", "die")
		if err := start(c); err == nil || !strings.Contains(err.Error(), "signal: killed") {
			t.Errorf("StartContainer: %v", err)
		}
		runtime.heal(t)
		equal(t, "reason", c.wait(t).Reason, "StartError")
	})
	t.Run("the second start fails", func(t *testing.T) {
		p := w.run(t, "brittle")
		runtime.does(t, "start", "at 2 fail not this one")
		first, second, third := p.create(t, "sleep"), p.create(t, "sleep"), p.create(t, "sleep")
		first.start(t)
		if err := start(second); err == nil || !strings.Contains(err.Error(), "not this one") {
			t.Errorf("StartContainer: %v", err)
		}
		third.start(t)
		runtime.heal(t)
		equal(t, "state of the first", first.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	})
	for _, c := range []struct{ verb, words string }{
		{"kill", "fail not now"}, {"kill", "hang"}, {"delete", "fail not now"}, {"delete", "hang"}, {"state", "garbage"}, {"state", "hang"},
	} {
		t.Run(c.verb+" "+c.words, func(t *testing.T) {
			container := w.run(t, "brittle").start(t, "ignore TERM ; sleep")
			runtime.does(t, c.verb, c.words)
			_, err := w.Runtime().StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: container.id, Timeout: 1})
			if err != nil && c.verb != "kill" {
				t.Errorf("StopContainer: %v", err)
			}
			runtime.heal(t)
		})
	}
	t.Run("exec hangs", func(t *testing.T) {
		c := w.run(t, "brittle").start(t, "sleep")
		runtime.does(t, "exec", "hang")
		_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "echo"}, Timeout: 1})
		wantCode(t, err, codes.DeadlineExceeded, "within 1s")
		runtime.heal(t)
	})
	w.Restored(t, w.empty)
}
