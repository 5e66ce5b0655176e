package integration

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/scene"
)

// executing makes a container of an image execute a program.
func executing(image, program string) containerChange {
	return func(c *cri.ContainerConfig) { c.Image.Image, c.Command, c.Args = image, []string{program}, nil }
}

// unmountable is a mount that no runtime can make: a directory over a file.
func unmountable(c *cri.ContainerConfig) {
	c.Mounts = []*cri.Mount{{HostPath: "/etc", ContainerPath: "/probe"}}
}

// A container whose program cannot be executed is created and fails to start,
// as in other runtimes: a kubelet that cannot create it would retry for ever,
// also for jobs and with restartPolicy Never. A kill of the server in between
// changes nothing.
func TestProgramThatCannotBeExecuted(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	plain := w.image(t, nil, image.Text("plain", "no program"))
	each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		c := p.Create(t, "", executing(probe, "/no/such/program"))
		other := p.Create(t, "", executing(plain, "/plain"))
		for _, line := range p.Traces(t) {
			if kind, _, _ := strings.Cut(line, ":"); strings.Contains(line, c.ID) && (kind == "process" || kind == "cgroup") {
				t.Errorf("before its start there is %s", line)
			}
		}
		if err := w.Crash(t.Context()); err != nil {
			t.Fatal(err)
		}
		listed, err := w.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: p.ID}})
		if err != nil || len(listed.Containers) != 2 {
			t.Fatalf("listed: %v, %v", listed, err)
		}
		for _, one := range listed.Containers {
			equal(t, "state in the list", one.State, cri.ContainerState_CONTAINER_CREATED)
		}
		wantCode(t, c.TryStart(t.Context()), codes.FailedPrecondition, "/no/such/program")
		s := c.Status(t)
		equal(t, "state", s.State, cri.ContainerState_CONTAINER_EXITED)
		equal(t, "exit code", s.ExitCode, 128)
		equal(t, "reason", s.Reason, "StartError")
		if s.StartedAt != 0 || s.FinishedAt < s.CreatedAt || !strings.Contains(s.Message, `create (to run "/no/such/program"): `) {
			t.Errorf("started at %d, finished at %d: %s", s.StartedAt, s.FinishedAt, s.Message)
		}
		if err := w.Crash(t.Context()); err != nil {
			t.Fatal(err)
		}
		after := c.Status(t)
		equal(t, "reason after a restart", after.Reason, "StartError")
		equal(t, "end after a restart", after.FinishedAt, s.FinishedAt)
		wantCode(t, c.TryStart(t.Context()), codes.FailedPrecondition)
		c.Remove(t)
		other.Remove(t) // which was never started
		w.Gone(t, c.ID, other.ID)
		equal(t, "exit code of the next", p.Start(t, "exit 0").Wait(t).ExitCode, 0)
	})
}

// The kubelet gets the events of such a container.
func TestEventsOfAProgramThatCannotBeExecuted(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		events := w.listen(t)
		c := p.Create(t, "", executing(probe, "nosuchprogram"))
		wantCode(t, c.TryStart(t.Context()), codes.FailedPrecondition, "nosuchprogram")
		c.Remove(t)
		var kinds []string
		for _, event := range events.until(t, c.ID, cri.ContainerEventType_CONTAINER_DELETED_EVENT) {
			if event.ContainerId == c.ID {
				kinds = append(kinds, event.ContainerEventType.String())
			}
		}
		equal(t, "events", strings.Join(kinds, " "), "CONTAINER_CREATED_EVENT CONTAINER_STOPPED_EVENT CONTAINER_DELETED_EVENT")
	})
}

// A fault other than the program's fails the creation, and there is no
// container.
func TestNodeFaultFailsTheCreate(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		before := p.Traces(t)
		_, err := p.Try(t.Context(), "sleep", unmountable)
		if err == nil {
			t.Fatal("the container was created")
		}
		p.NothingBut(t, before)
	})
}

// The caller gets only a runtime's error, on one line; the rest of the
// runtime's output, such as warnings or, here, all of its steps, goes to the
// server's log.
func TestErrorsOfTheRuntimeAreOneLine(t *testing.T) {
	t.Parallel()
	modern, err := tools.Runc(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	config := ""
	paths := map[string]string{"runc": "runc", "crun": "crun", "modern": modern}
	for name, program := range paths {
		path, err := exec.LookPath(program)
		if err != nil {
			t.Fatal(err)
		}
		config += "[runtime.handlers.talkative-" + name + "]\npath = \"" + path + "\"\noptions = [\"--debug\"]\n"
	}
	w := private(t, node.Options{Config: config})
	for name := range paths {
		t.Run(name, func(t *testing.T) {
			p := w.Pod(t, "talkative-"+name)
			oneLine := func(what string, err error) {
				t.Helper()
				if err == nil {
					t.Fatalf("%s succeeds", what)
				}
				for _, more := range []string{"\n", "level=", "msg=", `"msg"`, "ignored"} {
					if strings.Contains(err.Error(), more) {
						t.Errorf("%s: %v", what, err)
						break
					}
				}
			}
			_, err := p.Try(t.Context(), "sleep", unmountable)
			oneLine("create", err)
			missing := p.Create(t, "", executing(probe, "/no/such/program"))
			oneLine("start", missing.TryStart(t.Context()))
			log := scene.Read(t, w.LogFile())
			if name != "crun" && !strings.Contains(log, `msg="runtime log" container=`+missing.ID) { // crun logs nothing
				t.Error("the server's log has nothing of what the runtime has logged")
			}
			c := p.Start(t, "sleep")
			failed := c.ExecResult(t, "/no/such/program")
			oneLine("exec", errors.New(strings.TrimSuffix(string(failed.Stderr), "\n")))
		})
	}
}

// Only execve finds a program in an unknown format: the container has been
// started then, says so in its log in plain words, and ends.
func TestProgramOfNoKnownFormat(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.image(t, nil, image.Regular("broken", 0o755, []byte("\x7fELF and no more")))
	each(t, func(t *testing.T, handler string) {
		c := w.Pod(t, handler).Create(t, "", executing(ref, "/broken"))
		if err := c.TryStart(t.Context()); err != nil {
			t.Fatal(err)
		}
		s := c.Wait(t)
		if s.ExitCode == 0 || s.Reason != "Error" {
			t.Errorf("code %d, %s", s.ExitCode, s.Reason)
		}
		if said := c.Errors(t); !strings.Contains(strings.ToLower(said), "exec format error") || strings.Contains(said, `"msg"`) {
			t.Errorf("its log has %q", said)
		}
	})
}

// A command whose program is in an unknown format ends unexecuted, after the runtime has reported that it
// runs. Its exit code is told, however many processes of the server end at that time.
func TestCommandsOfNoKnownFormat(t *testing.T) {
	t.Parallel()
	w := shared(t)
	file := filepath.Join(w.dir(t), "broken")
	if err := os.WriteFile(file, []byte("\x7fELF and no more"), 0o755); err != nil {
		t.Fatal(err)
	}
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep", func(c *cri.ContainerConfig) {
			c.Mounts = []*cri.Mount{{HostPath: file, ContainerPath: "/broken"}}
		})
		crowd(t, 100, func(int) error {
			r, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/broken"}, Timeout: scene.LimitSeconds})
			if err == nil && r.ExitCode == 0 {
				err = fmt.Errorf("it succeeded: %q", r.Stderr)
			}
			return err
		})
	})
}
