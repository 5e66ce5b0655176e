package runtimes

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// eachShim is each for handlers with a shim.
func eachShim(t *testing.T, test func(t *testing.T, w *scene.World, handler string)) {
	t.Helper()
	eachOf(t, shims(), test)
}

func shims() []string {
	return slices.DeleteFunc(wanted(), func(h string) bool { return !tools.IsShim(h) })
}

// grouping are those with one shim for all containers of a pod. gVisor's has
// one for each, unless a file in /etc says otherwise.
func grouping() []string {
	return slices.DeleteFunc(shims(), func(h string) bool { return h == ofRunsc })
}

func katas() []string {
	return slices.DeleteFunc(wanted(), func(h string) bool { return h != kata })
}

// shimOf returns the process of a container's shim, and its address.
func shimOf(t *testing.T, dir string) (pid int, address string) {
	t.Helper()
	var record struct {
		Address string
		Process struct{ PID int }
	}
	if err := json.Unmarshal([]byte(scene.Read(t, filepath.Join(dir, "shim.json"))), &record); err != nil {
		t.Fatal(err)
	}
	return record.Process.PID, record.Address
}

// One shim serves all containers of a pod, and each pod has its own.
func TestOneShimPerPod(t *testing.T) {
	eachOf(t, grouping(), func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		first, address := shimOf(t, runDir(p.Start(t, "sleep")))
		second, same := shimOf(t, runDir(p.Start(t, "sleep")))
		if first != second || first <= 1 || address != same {
			t.Errorf("the shims of one pod: %d at %s, %d at %s", first, address, second, same)
		}
		if other, _ := shimOf(t, runDir(w.Pod(t, handler).Start(t, "sleep"))); other == first {
			t.Error("two pods share a shim")
		}
	})
}

// The socket of a shim is outside of the pod's directories, and is removed with
// the pod, however the shim has ended.
func TestSocketGoes(t *testing.T) {
	eachShim(t, func(t *testing.T, w *scene.World, handler string) {
		for _, killed := range []bool{false, true} {
			p := w.Pod(t, handler)
			shim, address := shimOf(t, runDir(p.Start(t, "sleep")))
			path, isFile := strings.CutPrefix(address, "unix://")
			if _, err := os.Lstat(path); isFile && err != nil {
				t.Fatal(err)
			}
			if killed {
				kill(t, shim)
			}
			p.Stop(t)
			p.Remove(t)
			if _, err := os.Lstat(path); isFile && err == nil {
				t.Errorf("%s is left (killed: %v)", path, killed)
			}
		}
	})
}

// The container for which the shim was started is removed, and with it the
// shim's working directory; the others do not notice.
func TestFirstContainerRemoved(t *testing.T) {
	eachOf(t, grouping(), func(t *testing.T, w *scene.World, handler string) {
		own := &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER} // with which a pod needs no container of its own
		p := w.Pod(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions = own })
		mine := func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions = own }
		first, second := p.Start(t, "sleep", mine), p.Start(t, "trap SIGTERM ; exit 7", mine)
		second.Says(t, "ready")
		shim, _ := shimOf(t, runDir(first))
		first.Stop(t, 0)
		first.Remove(t)
		scene.Equal(t, "command", second.Exec(t, "echo here"), "here\n")
		third := p.Start(t, "sleep", mine)
		if now, _ := shimOf(t, runDir(third)); now != shim {
			t.Errorf("the shim was %d and is %d", shim, now)
		}
		second.Stop(t, scene.LimitSeconds)
		scene.Equal(t, "exit code", second.Status(t).ExitCode, int32(7))
	})
}

// A server that starts without the program that calls shims manages their pods: only what needs it fails,
// and works again, without a restart, once it is back.
func TestProgramOfShimsIsMissingAtTheStart(t *testing.T) {
	eachPrivateOf(t, shims(), func(t *testing.T, w *scene.World, handler string) {
		dir := w.Dir(t)
		p, leaving := w.Pod(t, handler), w.Pod(t, handler, func(c *cri.PodSandboxConfig) { c.Metadata.Uid = "leaving" })
		c, created := p.Start(t, "sleep"), p.Create(t, "exit 3")
		ends := leaving.Start(t, "sleep")
		lends := func(program string) {
			t.Helper()
			if err := os.Symlink(w.Program(program), filepath.Join(dir, program)); err != nil {
				t.Fatal(err)
			}
		}
		lends("crius-conmon")
		if err := errors.Join(w.Configure("20-monitor", "[runtime]\nmonitor = \""+dir+"/crius-conmon\"\n"), w.Crash(t.Context())); err != nil {
			t.Fatal(err)
		}
		scene.Equal(t, "command", c.Exec(t, "echo here"), "here\n")
		ends.Stop(t, 0)
		ends.Remove(t)
		leaving.Stop(t)
		leaving.Remove(t)
		const missing = "crius-conmon-shim not found in the directory of "
		_, err := p.Try(t.Context(), "sleep")
		scene.WantCode(t, err, codes.Unavailable, missing)
		scene.WantCode(t, created.TryStart(t.Context()), codes.Unavailable, missing)
		scene.Equal(t, "code of the container that did not start", created.Wait(t).ExitCode, int32(128))
		lends("crius-conmon-shim")
		scene.Equal(t, "output", p.Finish(t, "echo here"), "here\n")
	})
}

// A server that cannot manage a pod, because its handler is gone and not on record, leaves the pod's shim
// alone, which has the id of a container that was removed.
func TestShimOfAPodThatIsNotManaged(t *testing.T) {
	eachPrivateOf(t, grouping(), func(t *testing.T, w *scene.World, handler string) {
		own := &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER} // with which a pod needs no container of its own
		p := w.Pod(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions = own })
		mine := func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions = own }
		first, second := p.Start(t, "sleep", mine), p.Start(t, "sleep", mine)
		first.Stop(t, 0)
		first.Remove(t)
		if err := w.Kill(); err != nil {
			t.Fatal(err)
		}
		giveBack := []func(){
			loseHandler(t, filepath.Join(w.StateRoot(), "pods", p.ID, "pod.json")),
			loseHandler(t, filepath.Join(w.StateRoot(), "containers", second.ID, "container.json")),
		}
		if err := w.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		logs(t, w, "pod is not managed, its runtime handler cannot be used", p.ID, "no runtime handler")
		if err := w.Kill(); err != nil {
			t.Fatal(err)
		}
		for _, restore := range giveBack {
			restore()
		}
		if err := w.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		scene.Equal(t, "command", second.Exec(t, "echo here"), "here\n")
	})
}

// loseHandler makes a record one of an early release, which has only the name of the handler, and that handler
// one that is not configured.
func loseHandler(t *testing.T, file string) (restore func()) {
	t.Helper()
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var record struct {
		Version int            `json:"version"`
		Body    map[string]any `json:"body"`
	}
	if err := json.Unmarshal(whole, &record); err != nil {
		t.Fatal(err)
	}
	record.Body["Handler"] = "gone"
	delete(record.Body, "Origin")
	early, err := json.Marshal(record)
	if err != nil {
		t.Fatal(err)
	}
	put := func(content []byte) {
		t.Helper()
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(early)
	return func() { put(whole) }
}

// The shim's containers end with it: they report that, nothing of them lives
// on, and they can be removed. Other pods' containers continue.
func TestShimKilled(t *testing.T) {
	eachShim(t, func(t *testing.T, w *scene.World, handler string) {
		p, other := w.Pod(t, handler), w.Pod(t, handler)
		c, created := p.Start(t, "sleep"), p.Create(t, "sleep")
		unharmed := other.Start(t, "sleep")
		shim, _ := shimOf(t, runDir(c))
		inner := inside(t, c, created)
		kill(t, shim)
		dead := []*scene.Container{c, created}
		if handler == ofRunsc { // which has another shim for each container
			dead = dead[:1]
		}
		for _, c := range dead {
			if s := c.Wait(t); s.ExitCode != 137 {
				t.Errorf("code %d, %s: %s", s.ExitCode, s.Reason, s.Message)
			}
		}
		vanishes(t, inner...)
		scene.Equal(t, "command in another pod", unharmed.Exec(t, "echo here"), "here\n")
		c.Remove(t)
	})
}

// The server is killed, and the shim as well: the server finds that all
// containers have ended when it comes back.
func TestShimKilledWithoutServer(t *testing.T) {
	eachPrivateOf(t, shims(), func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		shim, _ := shimOf(t, runDir(c))
		if err := w.Kill(); err != nil {
			t.Fatal(err)
		}
		kill(t, shim)
		exitNoted(t, c)
		if err := w.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(137))
	})
}

// Monitor and shim die together, so that no process with knowledge is left.
func TestShimAndMonitorKilled(t *testing.T) {
	eachShim(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		shim, _ := shimOf(t, runDir(c))
		monitor, _ := processes(t, runDir(c))
		kill(t, monitor)
		if err := unix.Kill(shim, unix.SIGKILL); err != nil && err != unix.ESRCH { // crius ends it, too
			t.Fatal(err)
		}
		if s := c.Wait(t); s.ExitCode != 137 {
			t.Errorf("code %d, %s: %s", s.ExitCode, s.Reason, s.Message)
		}
	})
}

// The input ends with the first attached client, and the container reads all of
// it.
func TestStdinOnce(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "digest ; exit 4", func(c *cri.ContainerConfig) { c.Stdin, c.StdinOnce = true, true })
		s := attach(t, c)
		if err := s.Send(strings.NewReader(strings.Repeat("x", 300_000))); err != nil {
			t.Error(err)
		}
		s.EndInput()
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(4))
		if out := c.Output(t); !strings.Contains(out, "300000") {
			t.Errorf("the container has read: %s", out)
		}
	})
}

// A hanging shim delays nothing for ever: its containers are killed with it.
func TestShimHangs(t *testing.T) {
	eachShim(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		c := p.Start(t, "sleep")
		shim, _ := shimOf(t, runDir(c))
		if err := unix.Kill(shim, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		defer unix.Kill(shim, unix.SIGCONT)
		inner := inside(t, c)
		wait.For(t, "the pod to be removed", func() bool { // the time limit of one request may be over before
			_, err := w.Runtime().RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: p.ID})
			return err == nil
		})
		vanishes(t, append(inner, shim)...)
	})
}

// kataPod tests what Kata's shims do and runc's does not.

func kataPod(t *testing.T, w *scene.World, annotations map[string]string) (*scene.Pod, error) {
	t.Helper()
	if err := missing[kata]; err != nil {
		t.Skipf("NOT TESTED, there is no %s: %v", kata, err)
	}
	return w.TryPod(t, kata, func(c *cri.PodSandboxConfig) {
		for key, value := range annotations {
			c.Annotations[key] = value
		}
	})
}

// The start waits for a machine that boots slowly.
func TestSlowBoot(t *testing.T) {
	eachKata(t, func(t *testing.T, w *scene.World) {
		p, err := kataPod(t, w, map[string]string{bootTime: "3s"})
		if err != nil {
			t.Fatal(err)
		}
		p.Start(t, "sleep")
	})
}

// The server, or the monitor, is killed while a machine boots: nothing is left
// of the machine.
func TestKilledDuringBoot(t *testing.T) {
	eachPrivateOf(t, katas(), func(t *testing.T, w *scene.World, handler string) {
		config := w.PodConfig(t, func(c *cri.PodSandboxConfig) { c.Annotations[bootTime] = "15s" })
		if err := w.Settle(t.Context(), handler); err != nil {
			t.Fatal(err)
		}
		for _, whom := range []string{"monitor", "server"} {
			failed := make(chan error, 1)
			go func() {
				_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
				failed <- err
			}()
			var shims []string
			wait.For(t, "a shim", func() bool {
				shims, _ = filepath.Glob(filepath.Join(w.RunRoot(), "pods", "*", "infra", "shim.json"))
				return len(shims) == 1
			})
			if whom == "monitor" {
				monitor, _ := processes(t, filepath.Dir(shims[0]))
				kill(t, monitor)
			} else if err := w.Crash(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-failed; err == nil {
				t.Fatalf("the %s was killed, and the pod runs", whom)
			}
			w.Bare(t)
		}
	})
}

// Shims are started, and answer, in several forms.
func TestWaysToStart(t *testing.T) {
	for form, version := range map[string]string{"json": `"version":3`, "bootstrap": `"version":3`, "older": `"version":2`} {
		t.Run(form, func(t *testing.T) {
			eachKata(t, func(t *testing.T, w *scene.World) {
				p, err := kataPod(t, w, map[string]string{answers: form})
				if err != nil {
					t.Fatal(err)
				}
				c := p.Start(t, "sleep")
				if text := scene.Read(t, filepath.Join(runDir(c), "shim.json")); !strings.Contains(text, version) {
					t.Errorf("%s", text)
				}
				scene.Equal(t, "command", c.Exec(t, "echo here"), "here\n")
			})
		})
	}
}

// A shim dies during a request: the caller gets an error, all containers have
// ended, and the pod is removed without a trace.
func TestShimDies(t *testing.T) {
	for _, at := range []string{"Create", "Start", "Exec"} {
		t.Run(at, func(t *testing.T) {
			eachKata(t, func(t *testing.T, w *scene.World) {
				p, err := kataPod(t, w, map[string]string{diesAt: at})
				if err != nil {
					t.Fatal(err)
				}
				c, err := p.Try(t.Context(), "sleep")
				if err == nil && at != "Create" {
					err = c.TryStart(t.Context())
				}
				if err == nil && at == "Exec" {
					_, err = w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"/probe", "exit", "0"}})
				}
				if err == nil || !strings.Contains(err.Error(), "shim") {
					t.Errorf("a shim that dies at %s: %v", at, err)
				}
				notReady(t, p)
				if at == "Exec" {
					scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(137))
				}
			})
		})
	}
}

// A guest claims to have killed a container, and has not: the machine ends with
// it, and nothing of either lives on.
func TestShimThatDoesNotKillItsContainer(t *testing.T) {
	eachKata(t, func(t *testing.T, w *scene.World) {
		p, err := kataPod(t, w, map[string]string{hangsAt: "kill"})
		if err != nil {
			t.Fatal(err)
		}
		c := p.Start(t, "sleep")
		shim, _ := shimOf(t, runDir(c))
		inner := inside(t, c)
		c.Stop(t, 0)
		scene.Equal(t, "exit code", c.Status(t).ExitCode, int32(137))
		vanishes(t, append(inner, shim)...)
		c.Remove(t)
	})
}

// inside returns the processes in the cgroups of containers: whatever pid the
// shim reports, those in the sandbox of the shim that behaves like Kata's are
// of this machine. In gVisor's they are the sandbox's, not the container's.
func inside(t *testing.T, containers ...*scene.Container) []int {
	t.Helper()
	var all []int
	for _, c := range containers {
		if c.Pod.Handler == ofRunsc {
			continue
		}
		pids := c.Processes(t)
		if len(pids) == 0 {
			t.Fatalf("no process is in the cgroup of container %s", c.ID)
		}
		all = append(all, pids...)
	}
	return all
}

// vanishes requires processes to be dead soon.
func vanishes(t *testing.T, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		if !wait.Until(t.Context(), func() bool { return ended(pid) }) {
			line, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
			t.Errorf("process %d lives on: %q", pid, line)
		}
	}
}

// ended reports whether a process runs no program any more. A zombie does not, and does no harm.
func ended(pid int) bool {
	_, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), "exe"))
	return err != nil
}

// An annotation that the handler does not allow does not reach the shim.
func TestHypervisorAnnotations(t *testing.T) {
	eachKata(t, func(t *testing.T, w *scene.World) {
		const path = "io.katacontainers.config.hypervisor.path"
		p, err := kataPod(t, w, map[string]string{path: "/tmp/evil", bootTime: "1ms"})
		if err != nil {
			t.Fatal(err)
		}
		got := annotations(t, p.Start(t, "sleep"))
		if _, reached := got[path]; reached || got[bootTime] != "1ms" {
			t.Errorf("annotations: %v", got)
		}
	})
}

// eachKata runs a test if the shim that behaves like Kata's is enabled.
func eachKata(t *testing.T, test func(t *testing.T, w *scene.World)) {
	t.Helper()
	eachOf(t, katas(), func(t *testing.T, w *scene.World, _ string) { test(t, w) })
}
