package oci

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/test/kit/wait"
)

// copied copies a program under a name.
func copied(t *testing.T, program, name string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(t.TempDir(), name)
	syscall.ForkLock.RLock() // no child may have it open for writing
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(target, text, 0o700); err != nil {
		t.Fatal(err)
	}
	return target
}

// Virtual machines are found by the id in their command lines, and killed with
// the container; neither another program that has the id in its arguments nor
// another pod's machine is.
func TestHelpers(t *testing.T) {
	t.Parallel()
	id, other := ids.Unmarked(), ids.Unmarked()
	run := func(program, id string) *exec.Cmd {
		t.Helper()
		cmd := exec.Command(program, "-c", "while :; do read line || exit; done", "sandbox-"+id) // a shell, which reads what nobody writes
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
	qemu := copied(t, "sh", "qemu-system-x86_64")
	machine, neighbour := run(qemu, id), run(qemu, other)
	editor, own := run(copied(t, "sh", "editor"), id), run(copied(t, "sh", "hypervisor-of-ours"), id)
	found := func(programs ...string) (pids []int) {
		all, err := Helpers(programs...)
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range all[id] {
			pids = append(pids, h.PID)
		}
		slices.Sort(pids)
		return pids
	}
	want := []int{machine.Process.Pid, own.Process.Pid}
	slices.Sort(want)
	wait.For(t, "the programs to run", func() bool { return slices.Equal(found("hypervisor-of-ours"), want) })
	if got := found(); !slices.Equal(got, []int{machine.Process.Pid}) {
		t.Errorf("found %v, want the machine %d and not the program %d", got, machine.Process.Pid, editor.Process.Pid)
	}
	short := run(copied(t, "sh", "firecracker"), id[:32]) // as Kata calls it
	var others []*exec.Cmd
	for _, odd := range []string{id[:31], id[:33], id[:63], id + "0", strings.ToUpper(id), other[:32]} {
		others = append(others, run(qemu, odd))
	}
	wait.For(t, "the programs to run", func() bool {
		all, err := Helpers()
		if err != nil {
			t.Fatal(err)
		}
		return len(all.Short(id)) == 1 && len(all.Short(other)) == 1
	})
	if err := endHelpers(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if alive(short.Process.Pid) {
		t.Error("a machine that has only the first digits of the id is alive")
	}
	for _, odd := range others {
		if !alive(odd.Process.Pid) {
			t.Errorf("%q was killed", odd.Args)
		}
	}
	if alive(machine.Process.Pid) || !alive(neighbour.Process.Pid) || !alive(editor.Process.Pid) {
		t.Errorf("alive: the machine %v, another pod's %v, an editor %v", alive(machine.Process.Pid), alive(neighbour.Process.Pid), alive(editor.Process.Pid))
	}
}

// A runtime that ignores --root has no state files where others do: it is asked
// whether it knows a container, and for the list of all of them. Others are not
// asked, since they would make their root for that.
func TestRuntimeWithStateElsewhere(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		version string
		options []string
		asked   bool
	}{
		"kata-runtime":        {"kata-runtime  : 1.13.0", nil, true},
		"unknown":             {"strange version 1.0", nil, true},
		"runc":                {"runc version 1.2.3", nil, false},
		"runc with its root":  {"runc version 1.2.3", []string{"--root=/elsewhere"}, true},
		"crun with its root ": {"crun version 1.20", []string{"--root", "/elsewhere"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, id := t.TempDir(), ids.Unmarked()
			calls := filepath.Join(dir, "calls")
			program := script(t, `case " $* " in
*" --version "*) echo `+c.version+`;;
*" features "*) exit 1;;
*" list "*) echo `+id+`;;
*" state `+id+` "*) [ -e `+dir+`/deleted ] && exit 1; echo state >>`+calls+`;;
*" delete --force `+id+` "*) echo delete >>`+calls+`; touch `+dir+`/deleted;;
*) exit 1;;
esac`)
			table := tableOf(t, map[string]Handler{"a": {Type: "oci", Path: program, Options: c.options}})
			r, err := table.Get("a")
			if err != nil {
				t.Fatal(err)
			}
			listed, err := r.List(t.Context())
			if err != nil || slices.Equal(listed, []string{id}) != c.asked {
				t.Errorf("list: %q, %v", listed, err)
			}
			for range 2 { // the second time there is nothing left to be done
				if err := r.Delete(t.Context(), Ref{ID: id, Dir: filepath.Join(dir, "none")}); err != nil {
					t.Fatal(err)
				}
			}
			want := "state delete"
			if !c.asked {
				want = ""
			}
			if text, err := os.ReadFile(calls); err != nil && c.asked || strings.Join(strings.Fields(string(text)), " ") != want {
				t.Errorf("the runtime was asked for %q, %v", text, err)
			}
		})
	}
}

// Kata mounts a pod's volumes below /run. If they are still there when the pod is
// removed, they are unmounted, and what is in the volumes stays.
func TestVolumesSurviveTheirPod(t *testing.T) {
	t.Parallel()
	id, volume := ids.Unmarked(), t.TempDir()
	precious := filepath.Join(volume, "precious")
	if err := os.WriteFile(precious, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const shared = "/run/kata-containers/shared/sandboxes"
	point := filepath.Join(shared, id, "shared", "volume")
	wait.For(t, "the mount point", func() bool { // a stand-in for Kata removes the directory when it is empty
		return os.MkdirAll(point, 0o700) == nil
	})
	if err := syscall.Mount(volume, point, "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(point, syscall.MNT_DETACH) })
	program := script(t, `case " $* " in
*" --version "*) echo "kata-runtime  : 1.13.0";;
*" state "*) echo "connection refused" >&2; exit 1;;
*" delete --force "*) ;;
*) exit 1;;
esac`)
	r, err := tableOf(t, map[string]Handler{"a": {Type: "oci", Path: program}}).Get("a")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Delete(t.Context(), Ref{ID: id, Dir: filepath.Join(volume, "none")}); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(precious); err != nil {
		t.Errorf("the content of the volume: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(shared, id)); err == nil {
		t.Error("Kata's files are left")
	}
	_ = os.Remove(shared) // unless others use it
	_ = os.Remove(filepath.Dir(shared))
}
