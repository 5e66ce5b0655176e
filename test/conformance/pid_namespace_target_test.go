package main_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// targeting puts a container into another one's PID namespace, as kubectl debug
// --target does.
func targeting(id string) scene.ContainerChange {
	return func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Pid: cri.NamespaceMode_TARGET, TargetId: id}
	}
}

func TestTargetedContainerSeesTheTargetsProcesses(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		target := p.Start(t, "fork 1 sleep 1h ; echo ready ; sleep 2h")
		bystander := p.Start(t, "sleep 3h")
		target.Says(t, "ready")
		debug := p.Start(t, "echo ready ; sleep 4h", targeting(target.ID))
		debug.Says(t, "ready") // before the program runs, its first process is called runc init

		f := debug.Facts(t)
		var seen []string
		for _, line := range f.Processes {
			seen = append(seen, line)
		}
		all := strings.Join(seen, "\n")
		for _, want := range []string{"sleep 1h", "sleep 2h", "sleep 4h"} {
			if !strings.Contains(all, want) {
				t.Errorf("%q is not among the processes:\n%s", want, all)
			}
		}
		if strings.Contains(all, "sleep 3h") {
			t.Errorf("another container's processes are seen:\n%s", all)
		}
		if !strings.Contains(f.Processes[1], "sleep 2h") {
			t.Errorf("process 1 is %q", f.Processes[1])
		}
		scene.Equal(t, "PID namespace", f.Namespaces["pid"], target.Facts(t).Namespaces["pid"])
		if f.Namespaces["mnt"] == target.Facts(t).Namespaces["mnt"] {
			t.Error("the mount namespace is the target's, too")
		}
		if strings.Contains(bystander.Exec(t, "facts"), "sleep 4h") {
			t.Error("a container that is not the target sees the new one")
		}

		// The namespace ends with its process 1, and so does everything in it.
		target.Stop(t, 0)
		scene.Equal(t, "exit code of who was inside", debug.Wait(t).ExitCode, 137)
	})
}

// The end of a container that targets a namespace does not affect the target.
func TestTargetSurvivesTheExitOfTargetedContainers(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	p := w.Pod(t, "crun")
	target := p.Start(t, "sleep")
	p.Finish(t, "echo done", targeting(target.ID))
	killed := p.Start(t, "ignore TERM ; sleep", targeting(target.ID))
	killed.Stop(t, 0)
	scene.Equal(t, "exit code of the killed one", killed.Status(t).ExitCode, 137)
	p.Start(t, "sleep", targeting(target.ID)).Remove(t)
	scene.Equal(t, "state of the target", target.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	if n := len(target.Facts(t).Processes); n != 2 { // itself and the exec
		t.Errorf("%d processes are in the target's namespace, want 2", n)
	}
}

// In a pod with one PID namespace the target's is the pod's.
func TestTargetInASharedPIDNamespace(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	p := w.Pod(t, "crun", func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD })
	forPod := func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD }
	target := p.Start(t, "sleep 2h", forPod)
	p.Start(t, "sleep 3h", forPod)
	debug := p.Start(t, "sleep 4h", targeting(target.ID))
	out := debug.Exec(t, "facts")
	for _, want := range []string{"sleep 2h", "sleep 3h"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not among the processes", want)
		}
	}
	target.Stop(t, 0)
	scene.Equal(t, "state", debug.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
}

func TestTargetsThatCannotBe(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	wrong := []codes.Code{codes.InvalidArgument, codes.FailedPrecondition, codes.NotFound}
	p, other := w.Pod(t, "crun"), w.Pod(t, "crun")
	foreign, ended := other.Start(t, "sleep"), p.Start(t, "exit 0")
	ended.Wait(t)
	p.Untouched(t, func() {
		for name, id := range map[string]string{
			"unknown": strings.Repeat("0", 64), "empty": "", "of another pod": foreign.ID, "ended": ended.ID, "a pod": p.ID,
		} {
			t.Run(name, func(t *testing.T) {
				_, err := p.Try(t.Context(), "sleep", targeting(id))
				scene.WantOneOf(t, err, wrong, "target")
			})
		}
	})
	for name, change := range map[string]func(*cri.NamespaceOption){
		"network": func(o *cri.NamespaceOption) { o.Network = cri.NamespaceMode_TARGET },
		"IPC":     func(o *cri.NamespaceOption) { o.Ipc = cri.NamespaceMode_TARGET },
	} {
		_, err := other.Try(t.Context(), "sleep", func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER, TargetId: foreign.ID}
			change(c.Linux.SecurityContext.NamespaceOptions)
		})
		if err == nil {
			t.Errorf("TARGET for the %s namespace was accepted", name)
		}
	}
	if _, err := w.TryPod(t, "crun", func(c *cri.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Pid: cri.NamespaceMode_TARGET, TargetId: foreign.ID}
	}); err == nil {
		t.Error("a pod with a target was accepted")
	}
}

// A target may end, and its pid may be reused by a process of the node, before
// the runtime joins its PID namespace.
func TestTargetsPidGivenToAnother(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	came, leave, slow := filepath.Join(dir, "came"), filepath.Join(dir, "leave"), filepath.Join(dir, "slow-runc")
	runc, err := exec.LookPath("runc")
	if err != nil {
		t.Fatal(err)
	}
	// It waits before the second create.
	scene.WriteProgram(t, slow, []byte(fmt.Sprintf("#!/bin/sh\nfor a; do [ \"$a\" != create ] || [ ! -e %s ] || { touch %s; until [ -e %s ]; do sleep .01; done; }; done\nexec %s \"$@\"\n",
		filepath.Join(dir, "armed"), came, leave, runc)))
	w := scene.Private(t, node.Options{Config: "[runtime.handlers.slow]\npath = \"" + slow + "\"\n"})
	p := w.Pod(t, "slow")
	target := p.Start(t, "sleep")
	pid := target.Processes(t)[0]
	touch(t, filepath.Join(dir, "armed"))

	type result struct {
		container *scene.Container
		err       error
	}
	done := make(chan result, 1)
	go func() {
		c, err := p.Try(context.WithoutCancel(t.Context()), "facts", targeting(target.ID))
		done <- result{c, err}
	}()
	wait.For(t, "the runtime to be asked for the container", func() bool { return exists(came) })
	target.Stop(t, 0)
	takePid(t, pid)
	touch(t, leave)

	if r := <-done; r.err == nil {
		t.Errorf("a container was created in the PID namespace of a target that had ended")
	}
}

func touch(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// takePid starts a process with this pid, for as long as the test runs. Other
// programs start processes, too, so it may take several tries.
func takePid(t *testing.T, pid int) {
	t.Helper()
	wait.For(t, "the pid to be free, and given to a process of the node", func() bool {
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(pid-1)), 0); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("sleep", "infinity")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		end := func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
		if cmd.Process.Pid != pid {
			end()
			return false
		}
		t.Cleanup(end)
		return true
	})
}
