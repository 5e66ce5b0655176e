package integration

import (
	"context"
	"strings"
	"testing"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

func TestStopAsksFirst(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "trap TERM ; exit 9")
		c.says(t, "ready")
		c.stop(t, scene.LimitSeconds)
		s := c.status(t)
		equal(t, "state", s.State, cri.ContainerState_CONTAINER_EXITED)
		equal(t, "exit code", s.ExitCode, 9)
		c.says(t, "SIGTERM")
	})
}

// The kernel discards a signal for which PID 1 has no handler yet, and does not
// deliver it later (pid_namespaces(7)). So crius sends it again once there is a
// handler, and only then: a program that already has a handler gets it once.
func TestStopSignalIsSentAgainToOneThatHadNoHandlerYet(t *testing.T) {
	t.Parallel()
	w := shared(t)
	shell, err := image.HostFile("bin/sh", "/bin/busybox", 0o755)
	if err != nil {
		t.Fatal(err)
	}
	ref := w.Image(t, func(c *imagespec.ImageConfig) { c.Entrypoint = []string{"/bin/sh", "-c"} }, image.Dir("bin"), shell)
	const program = `echo up; until [ -e /vol/go ]; do sleep 0.05; done; trap "echo heard" TERM; echo ready; while :; do sleep 0.05; done`
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for _, test := range []struct {
			handler     string
			heard, sent int
		}{
			{"before the signal", 1, 1},
			{"after the signal", 1, 2},
			{"never", 0, 1},
		} {
			dir := w.Dir(t)
			c := p.start(t, "", func(c *cri.ContainerConfig) {
				c.Image.Image, c.Args = ref, []string{program}
				c.Mounts = []*cri.Mount{{ContainerPath: "/vol", HostPath: dir}}
			})
			c.says(t, "up")
			handle := func() {
				scene.Write(t, dir+"/go", "")
				c.says(t, "ready")
			}
			if test.handler == "before the signal" {
				handle()
			}
			stopped := make(chan error, 1)
			go func() {
				_, err := w.Runtime().StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: c.id, Timeout: scene.LimitSeconds})
				stopped <- err
			}()
			sent := func() (n int) {
				for line := range strings.Lines(scene.Read(t, w.LogFile())) {
					if strings.Contains(line, "stop signal sent") && strings.Contains(line, c.id) {
						n++
					}
				}
				return n
			}
			wait.For(t, "the stop signal", func() bool { return sent() > 0 })
			if test.handler == "after the signal" {
				handle()
			}
			if test.heard > 0 {
				c.says(t, "heard")
			}
			wait.For(t, "a note of the stop signal", func() bool { return sent() >= test.sent })
			c.stop(t, 1) // the rest of the grace period
			if err := scene.Receive(t, "the first stop to return", stopped); err != nil {
				t.Errorf("handler %s: the first stop: %v", test.handler, err)
			}
			equal(t, "exit code", c.status(t).ExitCode, 137)
			equal(t, "signals that arrived, handler "+test.handler, strings.Count(c.output(t), "heard"), test.heard)
			equal(t, "signals that were sent, handler "+test.handler, sent(), test.sent)
			_, why, killed := strings.Cut(w.LogAbout(100, c.id), "did not exit within the grace period")
			if discarded := strings.Contains(why, "had no handler for the signal"); !killed || discarded != (test.handler == "never") {
				t.Errorf("handler %s: at the end of the grace period the server's log says %q", test.handler, why)
			}
		}
	})
}

func TestStopKillsAfterTheGracePeriod(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "ignore TERM ; echo ready ; fork 2 sleep ; sleep")
		c.says(t, "ready")
		began := time.Now()
		c.stop(t, 1)
		if took := time.Since(began); took < time.Second { // the wait is what is promised
			t.Errorf("a grace period of 1 s took %v", took)
		}
		s := c.status(t)
		equal(t, "state", s.State, cri.ContainerState_CONTAINER_EXITED)
		equal(t, "exit code", s.ExitCode, 137)
		c.says(t, "ignored SIGTERM")
		if left := w.processesOf(t, c.id); len(left) > 0 {
			t.Errorf("processes %v are left", left)
		}
	})
}

func TestStopWithoutGraceKillsAtOnce(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "trap TERM ; exit 9")
	c.says(t, "ready")
	c.stop(t, 0)
	equal(t, "exit code", c.status(t).ExitCode, 137)
}

func TestASecondShorterStopShortensTheFirst_crio_8748(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "ignore TERM ; echo ready ; sleep")
	c.says(t, "ready")
	first := make(chan error, 1)
	go func() {
		_, err := w.Runtime().StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: c.id, Timeout: 3600})
		first <- err
	}()
	c.says(t, "ignored SIGTERM")
	c.stop(t, 1) // which gives up long before the first one
	if err := scene.Receive(t, "the first stop to return", first); err != nil {
		t.Errorf("the first stop: %v", err)
	}
}

func TestStopIsIdempotent(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	c := p.start(t, "exit 5")
	want := c.wait(t)
	for range 3 {
		c.stop(t, 10)
	}
	got := c.status(t)
	equal(t, "exit code", got.ExitCode, want.ExitCode)
	equal(t, "finished at", got.FinishedAt, want.FinishedAt)
	for range 2 {
		c.remove(t)
	}
	_, err := w.Runtime().StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: c.id})
	if code := status.Code(err); code != codes.OK && code != codes.NotFound {
		t.Errorf("stop of a removed container: %v", err)
	}

	never := p.create(t, "sleep") // stopped before it was started
	never.stop(t, 0)
	never.remove(t)
}

func TestRemoveKillsARunningContainer(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "crun").start(t, "ignore TERM ; fork 3 sleep ; echo ready ; sleep")
	c.says(t, "ready")
	c.remove(t)
	if left := w.processesOf(t, c.id); len(left) > 0 {
		t.Errorf("processes %v are left", left)
	}
}

// A client that leaves ends its own wait, not the stop.
func TestStopGoesOnWithoutItsCaller(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "runc").start(t, "ignore TERM ; echo ready ; sleep")
	c.says(t, "ready")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stopped := make(chan error, 1)
	go func() {
		_, err := w.Runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: c.id, Timeout: 30})
		stopped <- err
	}()
	c.says(t, "ignored SIGTERM")
	cancel()
	wantCode(t, <-stopped, codes.Canceled)
	equal(t, "exit code", c.wait(t).ExitCode, 137)
}
