package main_test

import (
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/scene"
)

func limitedTo(bytes int64) scene.ContainerChange {
	return func(c *cri.ContainerConfig) {
		c.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: bytes, MemorySwapLimitInBytes: bytes, OomScoreAdj: 1000}
	}
}

// From api.proto: the reason "must be set to OOMKilled for containers
// terminated by cgroup-based Out-of-Memory killer". A program that ends by itself
// has not been terminated, whatever happened to a child (k8s#140716); the message
// tells of that. A shell that passes on its child's end by SIGKILL counts as
// terminated: the kubelet's own tests expect that.
func TestOOMKilled_kubernetes_140716(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	cases := map[string]struct {
		line   string
		code   int32
		reason string
	}{
		"the main process":                      {"alloc 200", 137, "OOMKilled"},
		"a child, then a failure":               {"outlive alloc 200 ; exit 3", 3, "Error"},
		"a child, then success":                 {"outlive alloc 200 ; exit 0", 0, "Completed"},
		"a child, and a code of its own":        {"run /probe alloc 200", 1, "Error"},
		"a child, and its code passed on":       {"outlive alloc 200 ; exit 137", 137, "OOMKilled"},
		"nobody, and the code of one killed":    {"exit 137", 137, "Error"},
		"nobody, though it comes near":          {"alloc 8 ; exit 1", 1, "Error"},
		"nobody, though it comes near and ends": {"alloc 8 ; exit 0", 0, "Completed"},
	}
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		all := map[string]*scene.Container{}
		for name, test := range cases {
			all[name] = p.Start(t, test.line, limitedTo(32*mib))
		}
		for name, test := range cases {
			t.Run(name, func(t *testing.T) {
				s := all[name].Wait(t)
				scene.Equal(t, "exit code", s.ExitCode, test.code)
				scene.Equal(t, "reason", s.Reason, test.reason)
				scene.Equal(t, "message tells of the child", strings.Contains(s.Message, "OOM killer"),
					strings.HasPrefix(name, "a child") && test.reason != "OOMKilled")
			})
		}
		// Killed from outside without any shortage.
		c := p.Start(t, "sleep", limitedTo(32*mib))
		c.Stop(t, 0)
		scene.Equal(t, "reason of a container killed by a stop", c.Status(t).Reason, "Error")
		scene.Equal(t, "its exit code", c.Status(t).ExitCode, 137)
	})
}

// What the OOM killer has killed before crius kills the container, or before that ends at its
// stop signal, is not why it ended, also for a server that was started since.
func TestOOMKillBeforeAStop_kubernetes_140716(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		for line, code := range map[string]int32{"ignore TERM ; echo ready ; sleep": 137, "echo ready ; sleep": 143} {
			c := p.Start(t, line, limitedTo(48*mib))
			c.Says(t, "ready")
			scene.Equal(t, "exit code of the exec", c.ExecResult(t, "/probe", "alloc", "200").ExitCode, 137)
			c.Stop(t, 1)
			s := c.Status(t)
			scene.Equal(t, "exit code", s.ExitCode, code)
			scene.Equal(t, "reason", s.Reason, "Error")
			scene.Equal(t, "message tells of the exec", strings.Contains(s.Message, "OOM killer killed 1 process"), true)
			scene.Equal(t, "message tells when, and what", strings.Contains(s.Message, `Z, when the command "probe" of an exec ended with code 137`), true)
		}
	})
}

// A killed exec is not the container.
func TestOOMOfAnExec(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	scene.Each(t, func(t *testing.T, handler string) {
		c := w.Pod(t, handler).Start(t, "trap TERM ; exit 0", limitedTo(48*mib))
		c.Says(t, "ready")
		resp := c.ExecResult(t, "/probe", "alloc", "200")
		scene.Equal(t, "exit code of the exec", resp.ExitCode, 137)
		scene.Equal(t, "state", c.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
		scene.Equal(t, "reason while it runs", strings.Contains(c.Status(t).Reason, "OOM"), false)
		c.Stop(t, scene.LimitSeconds)
		scene.Equal(t, "exit code at the end", c.Status(t).ExitCode, 0)
		scene.Equal(t, "reason at the end", c.Status(t).Reason, "Completed")
	})
}
