package integration

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/kubelet"
	"github.com/crius-run/crius/internal/testkit/node"
)

// brittle is a node whose handler "brittle" is a runtime that may be told to
// fail, and whose handler "hasty" is the same one with a time-out that a test
// can wait for, but far beyond what a create takes on a busy machine.
func brittle(t *testing.T, real string) (*world, *faulty) {
	t.Helper()
	w := private(t, node.Options{Config: `[runtime.handlers.brittle]
path = "{{.Path "brittle" "runtime"}}"

[runtime.handlers.hasty]
path = "{{.Path "brittle" "runtime"}}"
create_timeout = "15s"
`})
	path, err := exec.LookPath(real)
	if err != nil {
		t.Fatal(err)
	}
	runtime := install(t, w.Path("brittle"), "runtime", path)
	if err := w.settle(t.Context(), "brittle", "hasty"); err != nil {
		t.Fatal(err)
	}
	return w, runtime
}

func TestNameIsFreeAfterAFailedCreate_crio_9097(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, real string) {
		t.Parallel()
		w, runtime := brittle(t, real)
		pods := map[string]*pod{"brittle": w.run(t, "brittle"), "hasty": w.run(t, "hasty")}
		before := mustInventory(t, w)
		for words, text := range map[string]string{
			"fail out of luck today": "out of luck today",
			"after half done":        "half done", // the container exists by then
			"hang":                   "did not create the container within 15s",
			"hangafter":              "did not create the container within 15s",
			"die":                    "killed by signal 9",
			"garbage":                "reports success",
		} {
			t.Run(words, func(t *testing.T) {
				p := pods["brittle"]
				if strings.HasPrefix(words, "hang") {
					p = pods["hasty"]
				}
				runtime.does(t, "create", words)
				_, err := p.try(t.Context(), steps("sleep"))
				if err == nil || !strings.Contains(err.Error(), text) {
					t.Errorf("CreateContainer: %v, want an error that says %q", err, text)
				}
				runtime.heal(t)
				if err := w.Clean(t.Context(), before, patience); err != nil {
					t.Error(err)
				}
				c, err := p.try(t.Context(), steps("echo runs"))
				if err != nil {
					t.Fatalf("the retry: %v", err)
				}
				c.start(t)
				equal(t, "exit code of the retry", c.wait(t).ExitCode, 0)
				c.remove(t)
				p.made = p.made[:1]
			})
		}
	})
}

func TestRuntimeThatFailsLater(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, real string) {
		t.Parallel()
		w, runtime := brittle(t, real)
		t.Run("start fails", func(t *testing.T) {
			p := w.run(t, "brittle")
			c := p.create(t, "sleep")
			runtime.does(t, "start", "fail will not start")
			_, err := w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id})
			if err == nil || !strings.Contains(err.Error(), "will not start") {
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
			_, err := w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id})
			if err == nil || !strings.Contains(err.Error(), "signal: killed") {
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
			_, err := w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: second.id})
			if err == nil || !strings.Contains(err.Error(), "not this one") {
				t.Errorf("StartContainer: %v", err)
			}
			third.start(t)
			runtime.heal(t)
			equal(t, "state of the first", first.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
		})
		for _, verb := range []string{"kill", "delete", "state"} {
			for _, words := range []string{"fail not now", "hang", "garbage", "die"} {
				t.Run(verb+" "+words, func(t *testing.T) {
					p := w.run(t, "brittle")
					c := p.start(t, "ignore TERM ; sleep")
					runtime.does(t, verb, words)
					began := time.Now()
					_, err := w.Runtime().StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: c.id, Timeout: 1})
					if took := time.Since(began); took > endless {
						t.Errorf("StopContainer took %v", took)
					}
					if err != nil && verb != "kill" {
						t.Errorf("StopContainer: %v", err)
					}
					runtime.heal(t)
				})
			}
		}
		t.Run("exec hangs", func(t *testing.T) {
			p := w.run(t, "brittle")
			c := p.start(t, "sleep")
			runtime.does(t, "exec", "hang")
			began := time.Now()
			_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "echo"}, Timeout: 1})
			wantCode(t, err, codes.DeadlineExceeded, "within 1s")
			if took := time.Since(began); took > patience {
				t.Errorf("ExecSync took %v", took)
			}
			runtime.heal(t)
		})
		if err := w.Clean(t.Context(), w.empty, patience); err != nil {
			t.Error(err)
		}
	})
}

func TestACallerThatGivesUpFindsItsContainerLater_containerd_4604(t *testing.T) {
	t.Parallel()
	w, runtime := brittle(t, "runc")
	p := w.run(t, "brittle")
	before := len(runtime.calls(t, "create", "done"))
	runtime.does(t, "create", "slow 1s")
	request := &cri.CreateContainerRequest{
		PodSandboxId: p.id, SandboxConfig: p.config, Config: kubelet.Container("late", probe, steps("sleep")),
	}
	var ids []string
	if !eventually(func() bool {
		ctx, cancel := timeout(t, 300*time.Millisecond)
		defer cancel()
		resp, err := w.Runtime().CreateContainer(ctx, request)
		if err == nil {
			ids = append(ids, resp.ContainerId)
		}
		return err == nil
	}) {
		t.Fatal("no retry ever got the container")
	}
	list, err := w.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Containers) != 1 || list.Containers[0].Id != ids[0] {
		t.Errorf("there are containers %v, want the one that the retry got, %s", list.Containers, ids[0])
	}
	equal(t, "number of creations", len(runtime.calls(t, "create", "done")), before+1)
	p.made = append(p.made, ids...)
}
