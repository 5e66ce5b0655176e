package integration

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestExitCodesReasonsAndTimes(t *testing.T) {
	t.Parallel()
	w := shared(t)
	cases := map[string]struct {
		line   string
		code   int32
		reason string
	}{
		"success":            {"exit 0", 0, "Completed"},
		"failure":            {"exit 3", 3, "Error"},
		"largest code":       {"exit 255", 255, "Error"},
		"killed from inside": {"fork 1 echo child ; exit 137", 137, "Error"},
		"unhandled signal":   {"orphan echo x ; exit 143", 143, "Error"},
	}
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for name, c := range cases {
			before := time.Now().UnixNano()
			made := p.create(t, c.line)
			created := made.status(t)
			equal(t, name+": state after create", created.State, cri.ContainerState_CONTAINER_CREATED)
			equal(t, name+": started at before start", created.StartedAt, 0)
			equal(t, name+": finished at before start", created.FinishedAt, 0)
			made.start(t)
			s := made.wait(t)
			equal(t, name+": exit code", s.ExitCode, c.code)
			equal(t, name+": reason", s.Reason, c.reason)
			times := []int64{before, s.CreatedAt, s.StartedAt, s.FinishedAt, time.Now().UnixNano()}
			for i := range len(times) - 1 {
				if times[i] > times[i+1] {
					t.Errorf("%s: the order of now, created, started, finished, now is wrong: %v", name, times)
				}
			}
		}
	})
}

func TestSignalsFromOutside(t *testing.T) {
	t.Parallel()
	w := shared(t)
	forPod, forContainer := pidMode(cri.NamespaceMode_POD)
	each(t, func(t *testing.T, handler string) {
		// In a shared PID namespace a container's process is no PID 1, so a
		// signal without a handler ends it.
		p := w.run(t, handler, forPod)
		for signal, code := range map[string]int32{"KILL": 137, "TERM": 143, "HUP": 129} {
			s := p.start(t, "suicide "+signal, forContainer).wait(t)
			equal(t, "exit code of SIG"+signal, s.ExitCode, code)
			equal(t, "reason", s.Reason, "Error")
		}
	})
}

func TestOOMKilled(t *testing.T) {
	t.Parallel()
	w := shared(t)
	limited := func(c *cri.ContainerConfig) { c.Linux.Resources.MemoryLimitInBytes = 32 * mib }
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for range 5 {
			s := p.start(t, "alloc 200 ; sleep", limited).wait(t)
			equal(t, "exit code", s.ExitCode, 137)
			equal(t, "reason", s.Reason, "OOMKilled")
		}
		// The same code for another reason is no OOM.
		c := p.start(t, "sleep", limited)
		c.stop(t, 0)
		equal(t, "reason after SIGKILL", c.status(t).Reason, "Error")
	})
}

func TestOOMOfAChildProcess(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "run /probe alloc 200 ; exit 1", func(c *cri.ContainerConfig) { c.Linux.Resources.MemoryLimitInBytes = 32 * mib })
		s := c.wait(t)
		equal(t, "reason", s.Reason, "OOMKilled")
	})
}

// Containers that end at once, many at a time, each with a code of its own.
func TestShortLivesHaveTheRightCode(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		var all []*container
		for i := range 12 {
			all = append(all, p.create(t, fmt.Sprintf("exit %d", 100+i)))
		}
		var group sync.WaitGroup
		for _, c := range all {
			group.Go(func() {
				w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id})
			})
		}
		group.Wait()
		for i, c := range all {
			equal(t, "exit code", c.wait(t).ExitCode, int32(100+i))
		}
	})
}

func TestProgramsThatCannotRun(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for name, command := range map[string]string{
			"missing":        "/no/such/program",
			"not in PATH":    "no-such-program",
			"not executable": "/etc/passwd",
			"a directory":    "/etc",
		} {
			t.Run(name, func(t *testing.T) {
				c, err := p.try(t.Context(), nil, func(c *cri.ContainerConfig) { c.Command = []string{command} })
				if err == nil {
					_, err = w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id})
					if err != nil {
						s := c.status(t)
						equal(t, "state after a failed start", s.State, cri.ContainerState_CONTAINER_EXITED)
						if s.ExitCode == 0 {
							t.Error("exit code after a failed start is 0")
						}
					}
				}
				// crun names the program only where it is missing.
				named := err != nil && strings.Contains(err.Error(), strings.TrimPrefix(command, "/"))
				if err == nil || !named && (handler == "runc" || strings.HasPrefix(name, "m")) {
					t.Errorf("error %v does not name %s", err, command)
				}
			})
		}
	})
}

func TestStartTwiceIsRefused(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	running, exited := p.start(t, "sleep"), p.start(t, "exit 0")
	exited.wait(t)
	for name, c := range map[string]*container{"running": running, "exited": exited} {
		if _, err := w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id}); err == nil {
			t.Errorf("a container that is %s was started again", name)
		}
	}
}
