package integration

import (
	"context"
	"testing"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestStopAsksFirst(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "trap TERM ; exit 9")
		c.says(t, "ready")
		began := time.Now()
		c.stop(t, 60)
		if took := time.Since(began); took > 50*time.Second {
			t.Errorf("a container that ends at once took %v to stop", took)
		}
		s := c.status(t)
		equal(t, "state", s.State, cri.ContainerState_CONTAINER_EXITED)
		equal(t, "exit code", s.ExitCode, 9)
		c.says(t, "SIGTERM")
	})
}

func TestStopKillsAfterTheGracePeriod(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "ignore TERM ; echo ready ; fork 2 sleep ; sleep")
		c.says(t, "ready")
		began := time.Now()
		c.stop(t, 2)
		if took := time.Since(began); took < 2*time.Second {
			t.Errorf("a grace period of 2 s took %v", took)
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
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "trap TERM ; exit 9")
		c.says(t, "ready")
		c.stop(t, 0)
		equal(t, "exit code", c.status(t).ExitCode, 137)
	})
}

func TestASecondShorterStopShortensTheFirst_crio_8748(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "ignore TERM ; echo ready ; sleep")
		c.says(t, "ready")
		first := make(chan error, 1)
		go func() {
			_, err := w.Runtime().StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: c.id, Timeout: 300})
			first <- err
		}()
		c.says(t, "ignored SIGTERM")
		c.stop(t, 1) // which gives up long before the first one
		select {
		case err := <-first:
			if err != nil {
				t.Errorf("the first stop: %v", err)
			}
		case <-time.After(patience):
			t.Error("the first stop still waits after the container has exited")
		}
	})
}

func TestStopIsIdempotent(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
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
	})
}

func TestRemoveKillsARunningContainer(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "ignore TERM ; fork 3 sleep ; echo ready ; sleep")
		c.says(t, "ready")
		c.remove(t)
		if left := w.processesOf(t, c.id); len(left) > 0 {
			t.Errorf("processes %v are left", left)
		}
	})
}

func TestStopSignals(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.image(t, func(c *imagespec.ImageConfig) { c.StopSignal = "SIGUSR1" })
	odd := w.image(t, func(c *imagespec.ImageConfig) { c.StopSignal = "RTMIN+3" })
	number := w.image(t, func(c *imagespec.ImageConfig) { c.StopSignal = "12" })
	cases := map[string]struct {
		image  string
		signal cri.Signal
		want   string
	}{
		"default":          {probe, cri.Signal_SIGNAL_RUNTIME_DEFAULT, "SIGTERM"},
		"of the image":     {ref, cri.Signal_SIGNAL_RUNTIME_DEFAULT, "SIGUSR1"},
		"of the request":   {ref, cri.Signal_SIGNAL_SIGUSR2, "SIGUSR2"},
		"real-time":        {probe, cri.Signal_SIGNAL_SIGRTMINPLUS3, "SIGRTMIN+3"},
		"image, real-time": {odd, cri.Signal_SIGNAL_RUNTIME_DEFAULT, "SIGRTMIN+3"},
		"image, a number":  {number, cri.Signal_SIGNAL_RUNTIME_DEFAULT, "SIGUSR2"},
	}
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for name, c := range cases {
			made := p.start(t, "trap TERM USR1 USR2 RTMIN+3", func(config *cri.ContainerConfig) {
				config.Image.Image, config.StopSignal = c.image, c.signal
			})
			made.says(t, "ready")
			made.stop(t, 60)
			equal(t, name, made.output(t), "ready\n"+c.want+"\n")
		}
	})
}

// A client that goes away ends its own waiting, not the stop.
func TestStopGoesOnWithoutItsCaller(t *testing.T) {
	t.Parallel()
	w := shared(t)
	c := w.run(t, "runc").start(t, "ignore TERM ; echo ready ; sleep")
	c.says(t, "ready")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stopped := make(chan error, 1)
	go func() {
		_, err := w.Runtime().StopContainer(ctx, &cri.StopContainerRequest{ContainerId: c.id, Timeout: 10})
		stopped <- err
	}()
	c.says(t, "ignored SIGTERM")
	cancel()
	wantCode(t, <-stopped, codes.Canceled)
	equal(t, "exit code", c.wait(t).ExitCode, 137)
}
