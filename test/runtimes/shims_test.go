package runtimes

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/scene"
)

// eachShim is each for handlers that are driven by a shim.
func eachShim(t *testing.T, test func(t *testing.T, w *scene.World, handler string)) {
	t.Helper()
	eachOf(t, slices.DeleteFunc(wanted(), func(h string) bool { return kind(h) != "shim" }), test)
}

// shimOf is the process of a container's shim, and where it listens.
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

// One shim serves all containers of a pod, and another pod has another one.
func TestOneShimPerPod(t *testing.T) {
	eachShim(t, func(t *testing.T, w *scene.World, handler string) {
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

// With the shim its containers end: they say so, nothing of them lives on, and the
// pod can be removed. What other pods have goes on.
func TestShimKilled(t *testing.T) {
	eachShim(t, func(t *testing.T, w *scene.World, handler string) {
		p, other := w.Pod(t, handler), w.Pod(t, handler)
		c, created := p.Start(t, "sleep"), p.Create(t, "sleep")
		unharmed := other.Start(t, "sleep")
		shim, _ := shimOf(t, runDir(c))
		_, pid := processes(t, runDir(c))
		kill(t, shim)
		for _, c := range []*scene.Container{c, created} {
			if s := c.Wait(t); s.ExitCode != 137 {
				t.Errorf("code %d, %s: %s", s.ExitCode, s.Reason, s.Message)
			}
		}
		if _, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid), "ns", "mnt")); err == nil && pid != shim {
			t.Error("the container's process lives on")
		}
		scene.Equal(t, "command in another pod", unharmed.Exec(t, "echo here"), "here\n")
		c.Remove(t)
	})
}

// The server is killed, the shim as well: the server finds all ends when it comes
// back.
func TestShimKilledWithoutServer(t *testing.T) {
	alone(t, func(t *testing.T, w *scene.World, handler string) {
		if kind(handler) != "shim" {
			t.Skip("it has no shim")
		}
		c := w.Pod(t, handler).Start(t, "sleep")
		shim, _ := shimOf(t, runDir(c))
		if err := w.Kill(); err != nil {
			t.Fatal(err)
		}
		kill(t, shim)
		if !scene.Eventually(func() bool { _, err := os.Stat(exitFile(c)); return err == nil }) {
			t.Error("without a server nobody notes the exit")
		}
		if err := w.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(137))
	})
}

// Monitor and shim die together, so that nobody is left who knows anything.
func TestShimAndMonitorKilled(t *testing.T) {
	eachShim(t, func(t *testing.T, w *scene.World, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep")
		shim, _ := shimOf(t, runDir(c))
		monitor, _ := processes(t, runDir(c))
		kill(t, monitor)
		kill(t, shim)
		if s := c.Wait(t); s.ExitCode != 137 {
			t.Errorf("code %d, %s: %s", s.ExitCode, s.Reason, s.Message)
		}
	})
}

// With the client who attaches first the input ends, and the container reads all.
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

// What Kata's do that runc's does not.

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

// A machine that boots slowly is waited for.
func TestSlowBoot(t *testing.T) {
	eachKata(t, func(t *testing.T, w *scene.World) {
		began := time.Now()
		p, err := kataPod(t, w, map[string]string{bootTime: "3s"})
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < 3*time.Second {
			t.Errorf("a machine that takes 3 s to boot was there after %s: did the annotation reach it?", took)
		}
		p.Start(t, "sleep")
	})
}

// A shim that answers in JSON, and speaks version 3 of the service.
func TestVersion3(t *testing.T) {
	eachKata(t, func(t *testing.T, w *scene.World) {
		p, err := kataPod(t, w, map[string]string{answers: "json"})
		if err != nil {
			t.Fatal(err)
		}
		c := p.Start(t, "sleep")
		if text := scene.Read(t, filepath.Join(runDir(c), "shim.json")); !strings.Contains(text, `"version":3`) {
			t.Errorf("%s", text)
		}
		scene.Equal(t, "command", c.Exec(t, "echo here"), "here\n")
	})
}

// A shim dies while it is asked for something: who asked is told, all containers
// have ended, and the pod goes without a trace.
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
				if !scene.Eventually(func() bool { return p.Status(t).State == cri.PodSandboxState_SANDBOX_NOTREADY }) {
					t.Error("a pod without its shim is ready")
				}
				if at == "Exec" {
					scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(137))
				}
			})
		})
	}
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

// eachKata runs a test if the shim that behaves like Kata's is wanted.
func eachKata(t *testing.T, test func(t *testing.T, w *scene.World)) {
	t.Helper()
	eachOf(t, slices.DeleteFunc(wanted(), func(h string) bool { return h != kata }),
		func(t *testing.T, w *scene.World, _ string) { test(t, w) })
}
