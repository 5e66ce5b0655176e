package integration

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// pidModes are the PID modes of a container.
var pidModes = []cri.NamespaceMode{cri.NamespaceMode_POD, cri.NamespaceMode_CONTAINER, cri.NamespaceMode_NODE, cri.NamespaceMode_TARGET}

// inPIDMode runs a pod, and returns a change that puts its containers into the
// PID namespace.
func (w *world) inPIDMode(t *testing.T, handler string, mode cri.NamespaceMode) (*pod, containerChange) {
	t.Helper()
	forPod, forContainer := pidMode(mode)
	if mode == cri.NamespaceMode_TARGET { // which is not a mode for pods
		forPod, _ = pidMode(cri.NamespaceMode_CONTAINER)
	}
	p := w.run(t, handler, forPod)
	if mode == cri.NamespaceMode_TARGET {
		target := p.start(t, "sleep").id
		forContainer = func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Pid: mode, TargetId: target}
		}
	}
	return p, forContainer
}

// shellImage has a shell that runs its argument.
func (w *world) shellImage(t *testing.T) string {
	t.Helper()
	shell, err := image.HostFile("bin/sh", "/bin/busybox", 0o755)
	if err != nil {
		t.Fatal(err)
	}
	return w.Image(t, func(c *imagespec.ImageConfig) { c.Entrypoint = []string{"/bin/sh", "-c"} }, image.Dir("bin"), shell)
}

// script makes a container run a script with the shell of an image.
func script(ref, text string) containerChange {
	return func(c *cri.ContainerConfig) { c.Image.Image, c.Args = ref, []string{text} }
}

// aliveIn returns the processes of a container except zombies.
func (w *world) aliveIn(t *testing.T, id string) []int {
	t.Helper()
	return slices.DeleteFunc(w.processesOf(t, id), func(pid int) bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		_, state, _ := strings.Cut(string(stat), ") ")
		return err != nil || strings.HasPrefix(state, "Z") || strings.HasPrefix(state, "X")
	})
}

// A container that has exited, or been stopped, has no process, in any PID
// namespace: its ports, locks and volumes are free for the next one.
func TestNothingOutlivesAContainer(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.shellImage(t)
	each(t, func(t *testing.T, handler string) {
		for _, mode := range pidModes {
			t.Run(mode.String(), func(t *testing.T) {
				p, inMode := w.inPIDMode(t, handler, mode)
				c := p.start(t, "", inMode, script(ref, "(trap '' TERM HUP; sleep 7777 & sleep 7777) & echo up; sleep .2; exit 3"))
				s := c.wait(t)
				if left := w.aliveIn(t, c.id); len(left) > 0 {
					t.Errorf("processes %v are alive in an exited container", left)
				}
				equal(t, "exit code", s.ExitCode, 3)
				equal(t, "reason", s.Reason, "Error")
				equal(t, "message", s.Message, "")

				c = p.start(t, "", inMode, script(ref, "(trap '' TERM; sleep 7777) & trap 'exit 4' TERM; echo up; wait"))
				c.says(t, "up")
				c.stop(t, scene.LimitSeconds)
				if left := w.aliveIn(t, c.id); len(left) > 0 {
					t.Errorf("processes %v are alive in a stopped container", left)
				}
				equal(t, "exit code", c.status(t).ExitCode, 4)

				for _, word := range []string{"first", "second"} { // which would meet the first one's server
					c = p.start(t, "fork 1 serve 127.0.0.1:8080 "+word+" ; get http://127.0.0.1:8080/ ; exit 5", inMode)
					equal(t, "exit code of one that leaves a server", c.wait(t).ExitCode, 5)
					c.says(t, word)
				}
			})
		}
	})
}

// It needs no server; and a server that finds processes of an exited container
// ends them.
func TestServerEndsProcessesOfExitedContainers(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	ref := w.shellImage(t)
	each(t, func(t *testing.T, handler string) {
		forPod, forContainer := pidMode(cri.NamespaceMode_NODE)
		p := w.run(t, handler, forPod)
		dir := w.Dir(t)
		alone := p.start(t, "", forContainer, script(ref, "trap '' TERM; sleep 7777 & echo up; until [ -e /vol/go ]; do sleep .05; done"),
			withMounts(&cri.Mount{ContainerPath: "/vol", HostPath: dir}))
		alone.says(t, "up")
		exited := p.start(t, "exit 0", forContainer)
		exited.wait(t)

		must(t, w.Kill())
		scene.Write(t, dir+"/go", "")
		wait.For(t, "the end of a container without a server", func() bool { return len(w.aliveIn(t, alone.id)) == 0 })
		late := exec.Command("sleep", "7777")
		must(t, late.Start())
		defer late.Wait()
		defer late.Process.Kill()
		must(t, cgroup.Move(w.CgroupParent()+"/crius-"+exited.id, late.Process.Pid))
		must(t, w.Start(t.Context()))

		if left := w.aliveIn(t, exited.id); len(left) > 0 {
			t.Errorf("processes %v are alive in an exited container when the server serves", left)
		}
		equal(t, "exit code", alone.wait(t).ExitCode, 0)
	})
}

// A process that the monitor of an earlier release has left, or that the
// monitor could not kill, is ended before the exit is seen.
func TestServerEndsWhatTheMonitorLeft(t *testing.T) {
	t.Parallel()
	w := shared(t)
	ref := w.shellImage(t)
	each(t, func(t *testing.T, handler string) {
		forPod, forContainer := pidMode(cri.NamespaceMode_POD)
		p := w.run(t, handler, forPod)
		c := p.start(t, "", forContainer, script(ref, "sleep 7777 & echo up; wait"))
		c.says(t, "up")
		processes := w.aliveIn(t, c.id)
		for _, pid := range w.monitors(t, c.id) {
			process, err := os.FindProcess(pid)
			must(t, err)
			must(t, process.Kill())
		}
		c.wait(t)
		if left := w.aliveIn(t, c.id); len(left) > 0 {
			t.Errorf("processes %v are alive in an exited container", left)
		}
		// The first process of the pod's PID namespace cannot end before all others are reaped, by the
		// machine's init since their monitor is dead.
		wait.For(t, "its processes to be reaped", func() bool {
			return !slices.ContainsFunc(processes, func(pid int) bool { return syscall.Kill(pid, 0) == nil })
		})
	})
}

// Somebody has frozen a container, or its pod. The container is thawed for its stop signal; its pod
// belongs to the kubelet and stays frozen, but the container dies.
func TestStopOfFrozenContainers(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		parent := w.CgroupParent() + "/frozen" + handler
		t.Cleanup(func() { // the kubelet removes it
			for _, dir := range inventory.Cgroups(parent) {
				os.Remove(dir)
			}
		})
		p := w.run(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent = parent })
		alone, amid := p.start(t, "trap TERM ; exit 9"), p.start(t, "sleep")
		alone.says(t, "ready")

		freezeCgroup(t, parent+"/crius-"+alone.id)
		alone.stop(t, scene.LimitSeconds)
		equal(t, "exit code of a container that was frozen", alone.status(t).ExitCode, 9)

		thaw := freezeCgroup(t, parent)
		amid.stop(t, 0)
		equal(t, "exit code of a container in a frozen pod", amid.status(t).ExitCode, 137)
		equal(t, "the pod is still frozen", thaw(), true)
	})
}

// freezeCgroup freezes a cgroup. Thaw thaws it, and reports whether it was still frozen.
func freezeCgroup(t *testing.T, group string) (thaw func() bool) {
	t.Helper()
	state, frozen, thawed := "/sys/fs/cgroup/freezer"+group+"/freezer.state", "FROZEN", "THAWED"
	if cgroup.Detect() == cgroup.V2 {
		state, frozen, thawed = "/sys/fs/cgroup"+group+"/cgroup.freeze", "1", "0"
	}
	is := func() bool {
		text, err := os.ReadFile(state)
		return err == nil && strings.TrimSpace(string(text)) == frozen
	}
	must(t, os.WriteFile(state, []byte(frozen), 0))
	t.Cleanup(func() { os.WriteFile(state, []byte(thawed), 0) }) // if it is still there
	wait.For(t, "a frozen cgroup", is)
	return func() bool {
		was := is()
		must(t, os.WriteFile(state, []byte(thawed), 0))
		return was
	}
}
