package main_test

import (
	"fmt"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/scene"
)

// caught returns all signals that the probe waits for: every real-time signal,
// and some others.
func caught() string {
	names := []string{"trap TERM HUP INT QUIT USR1 USR2 WINCH"}
	for n := 34; n <= 64; n++ {
		names = append(names, fmt.Sprintf("RTMIN+%d", n-34))
	}
	return strings.Join(names, " ")
}

// TestStopSignals has each container print the signal that it received
// (KEP-4960): the request's, else the image's, else TERM. Real-time signals are
// counted from 34 up and from 64 down.
func TestStopSignals(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	const none = cri.Signal_SIGNAL_RUNTIME_DEFAULT
	cases := []struct {
		image    string // STOPSIGNAL
		request  cri.Signal
		says     string
		reported cri.Signal
	}{
		{"", none, "SIGTERM", cri.Signal_SIGNAL_SIGTERM},
		{"SIGQUIT", none, "SIGQUIT", cri.Signal_SIGNAL_SIGQUIT},
		{"quit", none, "SIGQUIT", cri.Signal_SIGNAL_SIGQUIT},
		{"10", none, "SIGUSR1", cri.Signal_SIGNAL_SIGUSR1},
		{"37", none, "SIGRTMIN+3", cri.Signal_SIGNAL_SIGRTMINPLUS3},
		{"SIGRTMIN+3", none, "SIGRTMIN+3", cri.Signal_SIGNAL_SIGRTMINPLUS3},
		{"RTMAX-2", none, "SIGRTMIN+28", cri.Signal_SIGNAL_SIGRTMAXMINUS2},
		{"SIGQUIT", cri.Signal_SIGNAL_SIGUSR2, "SIGUSR2", cri.Signal_SIGNAL_SIGUSR2},
		{"", cri.Signal_SIGNAL_SIGHUP, "SIGHUP", cri.Signal_SIGNAL_SIGHUP},
		{"", cri.Signal_SIGNAL_SIGWINCH, "SIGWINCH", cri.Signal_SIGNAL_SIGWINCH},
		{"", cri.Signal_SIGNAL_SIGRTMINPLUS1, "SIGRTMIN+1", cri.Signal_SIGNAL_SIGRTMINPLUS1},
		{"", cri.Signal_SIGNAL_SIGRTMINPLUS15, "SIGRTMIN+15", cri.Signal_SIGNAL_SIGRTMINPLUS15},
		{"", cri.Signal_SIGNAL_SIGRTMAXMINUS14, "SIGRTMIN+16", cri.Signal_SIGNAL_SIGRTMAXMINUS14},
		{"", cri.Signal_SIGNAL_SIGRTMAXMINUS1, "SIGRTMIN+29", cri.Signal_SIGNAL_SIGRTMAXMINUS1},
		{"", cri.Signal_SIGNAL_SIGRTMAX, "SIGRTMIN+30", cri.Signal_SIGNAL_SIGRTMAX},
		{"SIGNOTHING", cri.Signal_SIGNAL_SIGUSR2, "SIGUSR2", cri.Signal_SIGNAL_SIGUSR2},
	}
	images := map[string]string{}
	for _, c := range cases {
		if images[c.image] == "" {
			images[c.image] = w.Image(t, func(config *imagespec.ImageConfig) { config.StopSignal = c.image })
		}
	}
	p := w.Pod(t, "crun")
	for _, test := range cases {
		t.Run(fmt.Sprintf("image %q, request %v", test.image, test.request), func(t *testing.T) {
			c := p.Start(t, caught()+" ; exit 7", func(config *cri.ContainerConfig) {
				config.Image.Image, config.StopSignal = images[test.image], test.request
			})
			c.Says(t, "ready")
			scene.Equal(t, "stop signal in the status", c.Status(t).StopSignal, test.reported)
			c.Stop(t, scene.LimitSeconds)
			scene.Equal(t, "output", c.Output(t), "ready\n"+test.says+"\n")
			scene.Equal(t, "exit code", c.Status(t).ExitCode, 7)
		})
	}
}

// A Go program such as the probe cannot catch RTMIN itself, so its default
// action, which does not apply to a process 1, proves this one.
func TestStopSignalRTMIN(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	p := w.Pod(t, "crun", func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD })
	c := p.Start(t, "echo ready ; sleep", func(c *cri.ContainerConfig) {
		c.StopSignal = cri.Signal_SIGNAL_SIGRTMIN
		c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
	})
	c.Says(t, "ready")
	scene.Equal(t, "stop signal in the status", c.Status(t).StopSignal, cri.Signal_SIGNAL_SIGRTMIN)
	c.Stop(t, scene.LimitSeconds)
	scene.Equal(t, "exit code", c.Status(t).ExitCode, 128+34)
}

// An invalid STOPSIGNAL is either refused at once, or TERM is sent instead: a
// container that cannot be stopped is worse than either.
func TestStopSignalOfAnImageThatIsNone(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	var refs []string
	wrong := []string{"SIGNOTHING", "99", "-9", "RTMIN+99", "15x"}
	for _, s := range wrong {
		refs = append(refs, w.Image(t, func(c *imagespec.ImageConfig) { c.StopSignal = s }))
	}
	p := w.Pod(t, "crun")
	for i, name := range wrong {
		c, err := p.Try(t.Context(), caught()+" ; exit 7", func(c *cri.ContainerConfig) { c.Image.Image = refs[i] })
		if err != nil {
			scene.WantCode(t, err, codes.InvalidArgument, name)
			continue
		}
		c.Start(t)
		c.Says(t, "ready")
		scene.Equal(t, "stop signal in the status", c.Status(t).StopSignal, cri.Signal_SIGNAL_SIGTERM)
		c.Stop(t, scene.LimitSeconds)
		scene.Equal(t, "output", c.Output(t), "ready\nSIGTERM\n")
	}
}

// Stopping the pod sends the same signal.
func TestStopPodSendsTheStopSignal(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	p := w.Pod(t, "crun")
	c := p.Start(t, caught()+" ; exit 7", func(config *cri.ContainerConfig) { config.StopSignal = cri.Signal_SIGNAL_SIGUSR1 })
	c.Says(t, "ready")
	p.Stop(t)
	scene.Equal(t, "state", c.Status(t).State, cri.ContainerState_CONTAINER_EXITED)
	if out := c.Output(t); out != "ready\n" && out != "ready\nSIGUSR1\n" {
		t.Errorf("output is %q", out)
	}
}

// A stop signal of KILL has no grace period.
func TestStopSignalKill(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	c := w.Pod(t, "crun").Start(t, "echo ready ; sleep", func(c *cri.ContainerConfig) { c.StopSignal = cri.Signal_SIGNAL_SIGKILL })
	c.Says(t, "ready")
	c.Stop(t, 3600) // the call would time out long before
	scene.Equal(t, "exit code", c.Status(t).ExitCode, 137)
}
