package runtimes

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// A shim dies while its pod is stopped and removed, or comes up, at whatever step of the container or
// of the sandbox: verbs that end something succeed, and nothing is left.
func TestShimDiesAtEachStep(t *testing.T) {
	steps := []string{"Wait", "Kill", "Create of sandbox", "Start of sandbox", "Delete of sandbox"}
	if *every {
		steps = append(steps, "Connect", "State", "Delete", "Connect of sandbox", "Wait of sandbox", "State of sandbox", "Kill of sandbox", "Shutdown of sandbox")
	}
	for _, at := range steps {
		t.Run(at, func(t *testing.T) {
			eachKata(t, func(t *testing.T, w *scene.World) {
				p, err := kataPod(t, w, map[string]string{diesAt: at})
				if err != nil {
					if !strings.Contains(err.Error(), "shim") || !strings.HasSuffix(at, " of sandbox") {
						t.Errorf("a shim that dies: %v", err)
					}
					return // the world checks that nothing is left
				}
				c, err := p.Try(t.Context(), "sleep")
				if err == nil {
					err = c.TryStart(t.Context())
				}
				// Who notices the death first decides what the error is about.
				told := []string{"shim", "sandbox", "CONTAINER_EXITED", "is not ready", "is being stopped"}
				if err != nil && !slices.ContainsFunc(told, func(words string) bool { return strings.Contains(err.Error(), words) }) {
					t.Errorf("a shim that dies: %v", err)
				}
				p.Stop(t)
				p.Remove(t)
			})
		})
	}
}

// A shim whose answer to its start makes no sense lives: it is killed.
func TestShimThatNamesNoAddress(t *testing.T) {
	eachPrivateOf(t, katas(), func(t *testing.T, w *scene.World, handler string) {
		if err := w.Settle(t.Context(), handler); err != nil {
			t.Fatal(err)
		}
		_, err := kataPod(t, w, map[string]string{answers: "garbage"})
		if err == nil || !strings.Contains(err.Error(), "has no address") {
			t.Errorf("a shim that names no address: %v", err)
		}
		w.Bare(t)
	})
}

// A shim lives, and its socket is gone: containers end when they are told to, and nothing is
// left.
func TestShimThatCannotBeReached(t *testing.T) {
	eachShim(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler, func(c *cri.PodSandboxConfig) {
			if handler == kata || handler == kata1 {
				c.Annotations[hangsAt] = "deaf"
			}
		})
		c, other := p.Create(t, "sleep"), p.Create(t, "sleep")
		waiters := helpersOf(t, c.ID, other.ID)
		wait.For(t, "those who wait for the containers to reach the shim", func() bool {
			return !slices.ContainsFunc(waiters, func(pid int) bool { return !hasSocket(pid) })
		})
		c.Start(t)
		shim, address := shimOf(t, runDir(c))
		if path, isFile := strings.CutPrefix(address, "unix://"); isFile {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
		_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"/probe", "sleep"}})
		if err == nil || !strings.Contains(err.Error(), "shim") {
			t.Errorf("a command: %v", err)
		}
		c.Stop(t, 0)
		scene.Equal(t, "exit code", c.Status(t).ExitCode, int32(137))
		c.Remove(t)
		other.Remove(t)
		p.Stop(t)
		p.Remove(t)
		vanishes(t, shim)
	})
}

// A shim dies, and before its container's end is known another process listens under the name of
// its socket, and never answers: the shim is known to be dead, and nothing is asked of the other.
func TestImpostorAtTheShimsSocket(t *testing.T) {
	handlers := slices.DeleteFunc(shims(), func(h string) bool { return h != kata && h != kata1 }) // whose names are abstract
	eachOf(t, handlers, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		c := p.Start(t, "sleep")
		shim, address := shimOf(t, runDir(c))
		monitor, _ := processes(t, runDir(c))
		infra, _ := processes(t, filepath.Join(w.RunRoot(), "pods", p.ID, "infra"))
		waiters := []int{waiter(t, monitor), waiter(t, infra)}
		for _, pid := range waiters {
			if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
				t.Fatal(err)
			}
		}
		kill(t, shim)
		var visits atomic.Int32
		for _, name := range []string{"@" + address, "@" + address + "\x00"} {
			var listener net.Listener
			wait.For(t, "the name to be free", func() bool {
				err := w.Do(func() (err error) {
					listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
					return err
				})
				return err == nil
			})
			defer listener.Close()
			go func() {
				for {
					if _, err := listener.Accept(); err != nil { // and never closes it
						return
					}
					visits.Add(1)
				}
			}()
		}
		for _, pid := range waiters {
			if err := unix.Kill(pid, unix.SIGCONT); err != nil {
				t.Fatal(err)
			}
		}
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(137))
		notReady(t, p)
		p.Stop(t)
		p.Remove(t)
		scene.Equal(t, "connections to the other process", visits.Load(), int32(0))
	})
}

func inNodeNetwork(c *cri.PodSandboxConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
}

func containerInNodeNetwork(c *cri.ContainerConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
}

// loseRecords kills the server and the monitors of a pod with one container, and removes their
// records.
func loseRecords(t *testing.T, w *scene.World, p *scene.Pod, c *scene.Container) {
	t.Helper()
	if err := w.Kill(); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{p.ID, c.ID} {
		for _, pid := range makers(id) {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				t.Fatal(err)
			}
			vanishes(t, pid)
		}
	}
	err := errors.Join(os.RemoveAll(filepath.Join(w.StateRoot(), "pods", p.ID)), os.RemoveAll(filepath.Join(w.StateRoot(), "containers", c.ID)))
	if err != nil {
		t.Fatal(err)
	}
}

// startWithout starts the server without the handlers of this matrix, checks that processes end, and
// starts it with them again: what only a runtime can remove is left until then.
func startWithout(t *testing.T, w *scene.World, helpers []int) {
	t.Helper()
	o, err := prepare(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.Configure("10-options", ""), w.Start(t.Context())); err != nil {
		t.Fatal(err)
	}
	vanishes(t, helpers...)
	if err := errors.Join(w.Configure("10-options", o.Config), w.Restart(t.Context())); err != nil {
		t.Fatal(err)
	}
}

// The records of a pod and of its container are lost, and their monitors with them: what their
// runtime has left is found, by its helpers too, and removed on request or when a server starts, even
// if the handler has been removed from the configuration.
func TestLostRecords(t *testing.T) {
	handlers := wanted()
	if !*every && len(handlers) > 2 { // those that leave most
		handlers = slices.DeleteFunc(handlers, func(h string) bool { return h != gvisor && h != kata1 && h != kataCLI })
	}
	eachPrivateOf(t, handlers, func(t *testing.T, w *scene.World, handler string) {
		if err := w.Settle(t.Context(), handler); err != nil {
			t.Fatal(err)
		}
		for _, cure := range []string{"repair", "start", "start without the handler"} {
			// An address would not be reported while any of gVisor's pods has hidden its own.
			p := w.Pod(t, handler, inNodeNetwork)
			c := p.Start(t, "sleep", containerInNodeNetwork)
			helpers := helpersOf(t, p.ID, c.ID)
			if (tools.IsShim(handler) || handler == kataCLI) && len(helpers) == 0 {
				t.Error("the runtime has no process that names the pod or the container")
			}
			loseRecords(t, w, p, c)
			if cure == "repair" {
				found := findings(t, w)
				for _, helper := range helpers {
					told := slices.ContainsFunc(found, func(f finding) bool {
						return f.Status == "FAIL" && containsAll(f.Text, []string{"orphan ", fmt.Sprintf("process %d", helper)})
					})
					if !told && !ended(helper) { // it may have been a command of the server's
						t.Errorf("nothing is said of process %d: %+v", helper, found)
					}
				}
				for _, f := range findings(t, w, "--repair") {
					if f.Status == "FAIL" {
						t.Errorf("not repaired: %+v", f)
					}
				}
			}
			if cure == "start without the handler" {
				startWithout(t, w, helpers)
			} else if err := w.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			vanishes(t, helpers...)
		}
		if handler != ofRunsc { // with which empty cgroups of the node go as well
			w.Bare(t)
		}
	})
}

// helpersOf returns the processes of runtimes that name pods or containers.
func helpersOf(t *testing.T, ids ...string) (pids []int) {
	t.Helper()
	all, err := oci.Helpers()
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		for _, h := range all[id] {
			pids = append(pids, h.PID)
		}
	}
	return pids
}

// hasSocket reports whether a process has a connection.
func hasSocket(pid int) bool {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	return slices.ContainsFunc(files, func(file string) bool {
		target, _ := os.Readlink(file)
		return strings.HasPrefix(target, "socket:")
	})
}
