package runtimes

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// confined checks what the monitors of a pod's containers may do.
func confined(t *testing.T, when string, ids ...string) {
	t.Helper()
	const most = 1<<unix.CAP_KILL | 1<<unix.CAP_DAC_OVERRIDE
	for _, id := range ids {
		// A container that has not been started has the command line of its
		// runtime's create.
		monitors := slices.DeleteFunc(makers(id), func(pid int) bool {
			exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
			return err != nil || filepath.Base(exe) != "crius-conmon"
		})
		if len(monitors) == 0 {
			t.Errorf("%s: %s has no monitor", when, id)
		}
		for _, pid := range monitors {
			threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
			if err != nil {
				t.Error(err)
			}
			for _, thread := range threads {
				status, err := os.ReadFile(thread)
				if err != nil {
					continue // the thread has ended
				}
				for _, set := range []string{"CapEff", "CapPrm", "CapInh", "CapAmb"} {
					_, rest, _ := strings.Cut(string(status), "\n"+set+":\t")
					has, err := strconv.ParseUint(strings.Fields(rest)[0], 16, 64)
					if err != nil || has&^most != 0 {
						t.Errorf("%s: %s of a monitor's thread is %x, %v", when, set, has, err)
					}
				}
				if !strings.Contains(string(status), "\nNoNewPrivs:\t1\n") {
					t.Errorf("%s: a monitor's thread may get privileges", when)
				}
			}
		}
	}
}

// Monitors have few capabilities before the container's program runs, whatever
// they do, and so do processes beside them: a runtime's command that waits for
// a container has no more.
func TestMonitorsHaveFewCapabilities(t *testing.T) {
	eachPrivate(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		c := p.Create(t, "trap SIGTERM ; exit 7")
		all := []string{c.ID}
		if sandboxed(handler) {
			all = append(all, p.ID)
		}
		if handler != gvisor { // whose containers are started through their monitors
			confined(t, "after the create", all...)
		}
		c.Start(t)
		c.Says(t, "ready")
		confined(t, "after the start", all...)
		scene.Equal(t, "command", c.Exec(t, "echo here"), "here\n")
		log := filepath.Join(p.Config.LogDirectory, c.Config.LogPath)
		if err := os.Rename(log, log+".1"); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Runtime().ReopenContainerLog(t.Context(), &cri.ReopenContainerLogRequest{ContainerId: c.ID}); err != nil {
			t.Errorf("log rotation: %v", err)
		}
		confined(t, "after log rotation", all...)
		if err := w.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := w.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		confined(t, "with another server", all...)
		c.Stop(t, scene.LimitSeconds)
		scene.Equal(t, "exit code", c.Status(t).ExitCode, int32(7))
		scene.Equal(t, "output after the rotation", strings.TrimSpace(c.Output(t)), "SIGTERM")
	})
}

// Sandboxes and their helpers end with the pod, and so do all processes of
// containers.
func TestNothingIsLeftOfAPodThatIsStopped(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		c := p.Start(t, "fork 3 sleep ; echo up ; sleep")
		c.Says(t, "up")
		p.Stop(t)
		for _, id := range []string{c.ID, p.ID} {
			if left := (&scene.Container{Pod: p, ID: id}).Processes(t); len(left) > 0 {
				t.Errorf("processes %v are alive in a stopped pod", left)
			}
		}
	})
}

// In a PID namespace that outlives it, the processes of a container end with it
// nevertheless, even while there is no server.
func TestProcessesEndWithTheirContainerInASharedNamespace(t *testing.T) {
	eachPrivate(t, func(t *testing.T, w *scene.World, handler string) {
		shared := &cri.NamespaceOption{Pid: cri.NamespaceMode_POD}
		p := w.Pod(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions = shared })
		mine := func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions = shared }
		witness := p.Start(t, "sleep", mine)
		alive := func() (found []string) {
			for pid, line := range witness.Facts(t).Processes {
				if strings.Contains(line, "1234s") {
					found = append(found, fmt.Sprint(pid, " ", line))
				}
			}
			return found
		}
		c := p.Start(t, "fork 2 sleep 1234s ; echo up ; exit 3", mine)
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(3))
		if left := alive(); len(left) > 0 {
			t.Errorf("alive after the exit: %v", left)
		}

		c = p.Start(t, "fork 2 sleep 1234s ; echo up ; await /tmp/end ; exit 3", mine)
		c.Says(t, "up")
		c.Last(t, "write /tmp/end now")
		if err := w.Kill(); err != nil {
			t.Fatal(err)
		}
		exitNoted(t, c)
		if err := w.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(3))
		wait.For(t, "the processes to end", func() bool { return len(alive()) == 0 })
	})
}
