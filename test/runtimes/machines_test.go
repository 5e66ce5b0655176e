package runtimes

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// machines are the handlers whose virtual machines are processes of their own.
func machines() []string {
	return slices.DeleteFunc(wanted(), func(h string) bool { return h != kata1 && h != kataCLI })
}

// machineOf returns the process that is a pod's virtual machine.
func machineOf(t *testing.T, p *scene.Pod) int {
	t.Helper()
	file := filepath.Join(p.World.RunRoot(), "pods", p.ID, "infra", "machine.pid")
	if p.Handler == kataCLI {
		file = "/run/vc/sbs/" + p.ID + "/qemu-system-fakekata"
	}
	pid, err := strconv.Atoi(strings.TrimSpace(scene.Read(t, file)))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// The machine of a pod ends with the pod, even if nothing has ever been started
// in it.
func TestMachineEndsWithItsPod(t *testing.T) {
	eachOf(t, machines(), func(t *testing.T, w *scene.World, handler string) {
		for _, prepare := range []func(*scene.Pod){
			func(*scene.Pod) {},
			func(p *scene.Pod) { p.Create(t, "sleep") },
			func(p *scene.Pod) { p.Start(t, "sleep") },
			func(p *scene.Pod) { p.Finish(t, "exit 0") },
		} {
			p := w.Pod(t, handler)
			prepare(p)
			machine := machineOf(t, p)
			p.Stop(t)
			vanishes(t, machine)
			p.Remove(t)
		}
	})
}

// What ends with its machine has not succeeded, whatever the runtime says, and
// ends although a kata-shim stays (kata-containers/shim#272). The pod can be
// removed, and leaves nothing; what is in its volumes stays.
func TestMachineDies(t *testing.T) {
	eachOf(t, machines(), func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		volume := w.Dir(t)
		scene.Write(t, volume+"/precious", "data")
		c := p.Start(t, "sleep", func(c *cri.ContainerConfig) {
			c.Mounts = []*cri.Mount{{ContainerPath: "/vol", HostPath: volume}}
		})
		done := p.Start(t, "exit 0")
		waiting := p.Create(t, "sleep")
		scene.Equal(t, "exit code before", done.Wait(t).ExitCode, int32(0))
		ended := make(chan error, 1)
		go func() {
			_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"/probe", "sleep"}})
			ended <- err
		}()
		wait.For(t, "the command to run", func() bool { return len(c.Facts(t).Processes) == 3 })
		kill(t, machineOf(t, p))
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(137))
		scene.Equal(t, "exit code of what had ended before", done.Status(t).ExitCode, int32(0))
		notReady(t, p)
		<-ended
		if handler == kataCLI {
			scene.Equal(t, "exit code of what was not started", waiting.Wait(t).ExitCode, int32(137))
		}
		p.Stop(t)
		p.Remove(t)
		p.NothingBut(t, nil)
		scene.Equal(t, "file in the volume", scene.Read(t, volume+"/precious"), "data")
	})
}

// A machine that dies while there is no server is missed by the next one.
func TestMachineDiesWithoutServer(t *testing.T) {
	eachPrivateOf(t, machines(), func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		c := p.Start(t, "sleep")
		machine := machineOf(t, p)
		if err := w.Kill(); err != nil {
			t.Fatal(err)
		}
		kill(t, machine)
		vanishes(t, machine)
		if err := w.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		scene.Equal(t, "exit code", c.Wait(t).ExitCode, int32(137))
		notReady(t, p)
		p.Stop(t)
		p.Remove(t)
	})
}

// A virtual machine without a record is found by check and removed on request,
// and when a server starts.
func TestOrphanedMachine(t *testing.T) {
	eachPrivateOf(t, machines(), func(t *testing.T, w *scene.World, handler string) {
		build := map[string]func(context.Context) (string, error){kata1: tools.OldKataShim, kataCLI: tools.KataRuntime}[handler]
		path, err := build(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		launch := func(id string) *exec.Cmd {
			t.Helper()
			cmd := exec.Command(filepath.Join(filepath.Dir(path), "qemu-system-fakekata"), "machine", "-name", "sandbox-"+id)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
			})
			return cmd
		}
		of := func(root string) string { return ids.New(ids.Mark(root)) }
		id := of(w.StateRoot())
		machine, foreign := launch(id), launch(of("/another/root"))
		mapping := filepath.Join("/run/kata-containers/containers-mapping", id)
		if handler == kataCLI {
			wait.For(t, "the machine's file", func() bool { // a stand-in removes the directory when it is empty
				_ = os.MkdirAll(filepath.Dir(mapping), 0o700)
				return os.WriteFile(mapping, []byte("/nowhere"), 0o600) == nil
			})
		}
		// What names half of an id is found with something that has the whole.
		half := of(w.StateRoot())
		short, alone := launch(half[:32]), launch(of(w.StateRoot())[:32])
		if err := os.Mkdir(filepath.Join(w.RunRoot(), "containers", half), 0o700); err != nil {
			t.Fatal(err)
		}
		line := fmt.Sprintf("qemu-system-fakekata, process %d,", machine.Process.Pid)
		is := func(words string) func(finding) bool {
			return func(f finding) bool {
				return f.Status == "FAIL" && containsAll(f.Text, []string{"orphan " + id, words})
			}
		}
		found := findings(t, w)
		if !slices.ContainsFunc(found, is(line)) || handler == kataCLI && !slices.ContainsFunc(found, is("container of runtime handler "+handler)) {
			t.Errorf("not found: %+v", found)
		}
		if line := fmt.Sprintf("process %d,", short.Process.Pid); !slices.ContainsFunc(found, func(f finding) bool { return containsAll(f.Text, []string{"orphan " + half, line}) }) {
			t.Errorf("half of an id is not found: %+v", found)
		}
		for _, f := range findings(t, w, "--repair") {
			if f.Status == "FAIL" {
				t.Errorf("not repaired: %+v", f)
			}
		}
		vanishes(t, machine.Process.Pid, short.Process.Pid)
		if _, err := os.Lstat(mapping); err == nil {
			t.Errorf("%s is left", mapping)
		}
		_ = os.Remove(filepath.Dir(mapping)) // unless others use it

		next := launch(of(w.StateRoot()))
		if err := w.Crash(t.Context()); err != nil {
			t.Fatal(err)
		}
		vanishes(t, next.Process.Pid)
		for _, other := range []*exec.Cmd{foreign, alone} {
			if stat := scene.Read(t, fmt.Sprintf("/proc/%d/stat", other.Process.Pid)); strings.Contains(stat, ") Z ") {
				t.Errorf("a machine that may be another server's was killed: %q", other.Args)
			}
		}
	})
}

// A handler gets another name while its pods run, and another server of the node has the same
// runtime: to neither of them are the machines of these pods orphans, not when it starts either.
func TestMachinesOfARenamedHandlerStay(t *testing.T) {
	eachPrivateOf(t, machines(), func(t *testing.T, w *scene.World, handler string) {
		o, err := prepare(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		other := scene.Private(t, o)
		p, foreign := w.Pod(t, handler), other.Pod(t, handler)
		c := p.Start(t, "sleep")
		pids := []int{machineOf(t, p), machineOf(t, foreign)}
		const name = "renamed"
		renamed := strings.Replace(o.Config, "[runtime.handlers."+handler+"]", "[runtime.handlers."+name+"]", 1)
		if err := w.Configure("10-options", renamed); err != nil {
			t.Fatal(err)
		}
		for _, server := range []*scene.World{w, other} {
			if err := server.Crash(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, f := range findings(t, server, "--repair") {
				if f.Status == "FAIL" {
					t.Errorf("found: %+v", f)
				}
			}
		}
		for _, pid := range pids {
			if stat := scene.Read(t, fmt.Sprintf("/proc/%d/stat", pid)); strings.Contains(stat, ") Z ") {
				t.Error("the machine of a pod was killed")
			}
		}
		scene.Equal(t, "command", c.Exec(t, "echo here"), "here\n")
		next := w.Pod(t, name)
		scene.Equal(t, "command in a pod of the new name", next.Start(t, "sleep").Exec(t, "echo here"), "here\n")
		for _, pod := range []*scene.Pod{p, foreign} {
			pod.Stop(t)
			pod.Remove(t)
		}
		vanishes(t, pids...)
	})
}
