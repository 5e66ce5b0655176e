package main_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/scene"
)

// The kubelet shows reason and exit code to users, and recognizes crash loops
// by finished_at.
func TestExitReasons(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	cases := map[string]struct {
		line   string
		code   int32
		reason string
	}{
		"success":          {"exit 0", 0, "Completed"},
		"failure":          {"exit 1", 1, "Error"},
		"the largest code": {"exit 255", 255, "Error"},
	}
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD })
		inPod := func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD }
		for name, test := range cases {
			t.Run(name, func(t *testing.T) {
				before := time.Now().UnixNano()
				s := p.Start(t, test.line, inPod).Wait(t)
				scene.Equal(t, "exit code", s.ExitCode, test.code)
				scene.Equal(t, "reason", s.Reason, test.reason)
				order := []int64{before, s.CreatedAt, s.StartedAt, s.FinishedAt, time.Now().UnixNano()}
				for i := range len(order) - 1 {
					if order[i] > order[i+1] {
						t.Errorf("now, created, started, finished, now are %v", order)
					}
				}
			})
		}
		for _, signal := range []struct {
			name   string
			number int32
		}{{"HUP", 1}, {"INT", 2}, {"KILL", 9}, {"TERM", 15}} { // signals from which the Go runtime dies
			s := p.Start(t, "suicide "+signal.name, inPod).Wait(t)
			scene.Equal(t, "exit code by "+signal.name, s.ExitCode, 128+signal.number)
			scene.Equal(t, "reason by "+signal.name, s.Reason, "Error")
		}
	})
}

// A program that cannot be run: the caller gets an error, and the container has
// exited with a reason, code 128 and times, so that the kubelet backs off.
func TestProgramsThatCannotBeRun(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	ref := w.Image(t, nil, image.Text("plain", "no program"), image.Text("file", "x"))
	command := func(argv ...string) scene.ContainerChange {
		return func(c *cri.ContainerConfig) { c.Image.Image, c.Command, c.Args = ref, argv, nil }
	}
	cases := map[string]struct {
		change scene.ContainerChange
		words  string
	}{
		"not there":       {command("/no/such/program"), "no such file"},
		"not in the path": {command("nosuchprogram"), "nosuchprogram"},
		"not executable":  {command("/plain"), "permission denied"},
		"a directory":     {command("/etc"), "/etc"},
		"a cwd that is a file": {both(command("/probe", "exit", "0"), func(c *cri.ContainerConfig) {
			c.WorkingDir = "/file"
		}), "/file"},
	}
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		for name, test := range cases {
			t.Run(name, func(t *testing.T) {
				c := p.Create(t, "", test.change)
				scene.Equal(t, "state before the start", c.Status(t).State, cri.ContainerState_CONTAINER_CREATED)
				err := c.TryStart(t.Context())
				if err == nil {
					t.Fatal("StartContainer says that it runs")
				}
				if !strings.Contains(strings.ToLower(err.Error()), test.words) {
					t.Errorf("the message does not say %q: %v", test.words, err)
				}
				s := c.Wait(t)
				scene.Equal(t, "exit code", s.ExitCode, 128)
				scene.Equal(t, "reason", s.Reason, "StartError")
				if s.StartedAt != 0 || s.FinishedAt == 0 || !strings.HasSuffix(err.Error(), s.Message) || s.Message == "" {
					t.Errorf("started at %d, finished at %d with the message %q", s.StartedAt, s.FinishedAt, s.Message)
				}
				scene.WantCode(t, c.TryStart(t.Context()), codes.FailedPrecondition)
				c.Remove(t)
			})
		}
	})
}

// Only execve detects a missing interpreter, after the runtime has reported
// that the container is running.
func TestMissingInterpreter(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	ref := w.Image(t, nil, image.Regular("script", 0o755, []byte("#!/no/such/shell\n")), image.Regular("empty", 0o755, nil))
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		for _, program := range []string{"/script", "/empty"} {
			c, err := p.Try(t.Context(), "", func(c *cri.ContainerConfig) { c.Image.Image, c.Command, c.Args = ref, []string{program}, nil })
			if err != nil {
				continue
			}
			started := c.TryStart(t.Context())
			s := c.Wait(t)
			if s.ExitCode == 0 || s.Reason != "Error" && s.Reason != "StartError" {
				t.Errorf("%s: StartContainer says %v, then code %d and reason %q", program, started, s.ExitCode, s.Reason)
			}
		}
	})
}

// An exit never changes.
func TestExitStaysAsItWas(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	p := w.Pod(t, "crun")
	c := p.Start(t, "exit 9")
	first := c.Wait(t)
	c.Stop(t, 5)
	p.Stop(t)
	second := c.Status(t)
	scene.Equal(t, "exit", fmt.Sprint(second.ExitCode, second.Reason, second.FinishedAt, second.State),
		fmt.Sprint(first.ExitCode, first.Reason, first.FinishedAt, first.State))
}
