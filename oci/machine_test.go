package oci

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/test/kit/wait"
)

// A container is in the virtual machine that names its pod, in full or in part.
// Without one that crius knows nothing is noted, and a file that cannot be read
// does not mean that the machine is dead.
func TestMachineOfAContainer(t *testing.T) {
	t.Parallel()
	pod, other := ids.Unmarked(), ids.Unmarked()
	launch := func(program, id string) *exec.Cmd {
		t.Helper()
		cmd := exec.Command(copied(t, "sh", program), "-c", "while :; do read line || exit; done", "sandbox-"+id)
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = stdin.Close()
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		return cmd
	}
	machine := launch("qemu-lite-system-x86_64", pod)
	launch("kata-proxy", pod)
	launch("my-hypervisor", other)
	short := launch("firecracker", other[:32])
	wait.For(t, "the programs to run", func() bool {
		all, err := Helpers()
		if err != nil {
			t.Fatal(err)
		}
		return len(all[pod]) == 2 && len(all.Short(other)) == 1
	})
	note := func(ref Ref) Ref {
		t.Helper()
		ref.Dir = t.TempDir()
		if err := noteMachine(ref); err != nil {
			t.Fatal(err)
		}
		return ref
	}
	refs := map[string]Ref{
		"the pod's own container":   note(Ref{ID: pod}),
		"one in the pod":            note(Ref{ID: ids.Unmarked(), Holder: pod}),
		"one in Firecracker":        note(Ref{ID: ids.Unmarked(), Holder: other}),
		"one without known machine": note(Ref{ID: ids.Unmarked(), Holder: ids.Unmarked()}),
		"one with a broken file":    note(Ref{ID: ids.Unmarked(), Holder: pod}),
	}
	if err := os.WriteFile(filepath.Join(refs["one with a broken file"].Dir, machineFile), []byte("[{"), 0o600); err != nil {
		t.Fatal(err)
	}
	dead := func(when string, want map[string]bool) {
		t.Helper()
		for name, ref := range refs {
			if died := machineDied(ref); died != want[name] {
				t.Errorf("%s: machine of %s dead: %v, want %v", when, name, died, want[name])
			}
		}
	}
	dead("at first", nil)
	if err := machine.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := machine.Wait(); err == nil {
		t.Fatal("the machine has ended without an error")
	}
	dead("without QEMU", map[string]bool{"the pod's own container": true, "one in the pod": true})
	if err := short.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := short.Wait(); err == nil {
		t.Fatal("the machine has ended without an error")
	}
	dead("without both", map[string]bool{"the pod's own container": true, "one in the pod": true, "one in Firecracker": true})
}
