package claim

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/wait"
)

// occupied is a claim with a process in its own cgroup and a mount.
func occupied(t *testing.T) *Claim {
	t.Helper()
	c, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.scrub(); os.Remove(c.Dir + lockSuffix) })
	point := filepath.Join(c.Dir, "point")
	if err := os.MkdirAll(point, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", point, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", `trap "" TERM; : >"$0"; read -r line`, filepath.Join(c.Dir, "ready"))
	if _, err := cmd.StdinPipe(); err != nil { // no input comes: it waits without a child
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go cmd.Wait()
	wait.For(t, "the process to run", func() bool { _, err := os.Stat(filepath.Join(c.Dir, "ready")); return err == nil })
	if hierarchies, _ := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs"); len(hierarchies) > 0 {
		dir := filepath.Join(filepath.Dir(hierarchies[0]), c.ID, "pods", "x")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// left lists everything with the claim's name.
func left(t *testing.T, c *Claim) []string {
	t.Helper()
	snapshot, err := inventory.Take(inventory.Scope{Dir: c.Dir, Roots: []string{c.Dir}, Cgroup: "/" + c.ID})
	if err != nil {
		t.Fatal(err)
	}
	names, err := filepath.Glob(c.Dir + "*")
	if err != nil {
		t.Fatal(err)
	}
	return append(snapshot.Lines(), names...)
}

func TestReleaseRemovesEverything(t *testing.T) {
	c := occupied(t)
	if len(left(t, c)) < 4 {
		t.Fatalf("the claim is not occupied: %q", left(t, c))
	}
	if err := c.Release(); err != nil {
		t.Fatal(err)
	}
	if lines := left(t, c); len(lines) > 0 {
		t.Errorf("left: %q", lines)
	}
}

func TestSweepReleasesOnlyClaimsOfTheDead(t *testing.T) {
	usual := parent
	parent = t.TempDir() // other test programs sweep /tmp
	t.Cleanup(func() { parent = usual })
	living, dead := occupied(t), occupied(t)
	before := len(left(t, living))
	dead.lock.Close() // as the kernel does when the owner ends
	if ids, err := Sweep(); err != nil || !slices.Equal(ids, []string{dead.ID}) {
		t.Fatalf("swept %q, %v", ids, err)
	}
	if lines := left(t, dead); len(lines) > 0 {
		t.Errorf("left of an owner that has ended: %q", lines)
	}
	if lines := left(t, living); len(lines) != before {
		t.Errorf("an owner that lives has %q left of %d lines", lines, before)
	}
	if ids, err := Sweep(); err != nil || len(ids) > 0 {
		t.Errorf("a second sweep finds %q, %v", ids, err)
	}
	if err := living.Release(); err != nil {
		t.Error(err)
	}
}

// What runtimes leave in places that nodes share goes with the claim of its node,
// and nothing else does: neither that of another node nor what was mounted there.
func TestSweepRemovesWhatRuntimesHaveLeft(t *testing.T) {
	usual, usualPlaces, usualSockets := parent, places, shimSockets
	dir := t.TempDir()
	parent, places, shimSockets = t.TempDir(), []string{filepath.Join(dir, "sbs", "*")}, filepath.Join(dir, "s")
	t.Cleanup(func() { parent, places, shimSockets = usual, usualPlaces, usualSockets })
	source := filepath.Join(dir, "source")
	write := func(path, text string) string {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	kept := []string{write(filepath.Join(source, "file"), "")}
	claimed := func() (c *Claim, made []string) {
		t.Helper()
		c, err := New()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.scrub(); os.Remove(c.Dir + lockSuffix) })
		for _, root := range roots {
			made = append(made, write(filepath.Join(dir, "sbs", ids.New(ids.Mark(filepath.Join(c.Dir, root))), "state"), ""))
		}
		shared := filepath.Join(filepath.Dir(made[0]), "shared")
		if err := errors.Join(os.Mkdir(shared, 0o755), unix.Mount(source, shared, "", unix.MS_BIND, "")); err != nil {
			t.Fatal(err)
		}
		for i, of := range []string{"r/containers/a", "r/pods/b/infra"} {
			socket := write(filepath.Join(shimSockets, fmt.Sprint(c.ID, i)), "")
			write(filepath.Join(c.Dir, of, "address"), "unix://"+socket)
			made = append(made, socket)
		}
		foreign := write(filepath.Join(dir, c.ID), "")
		write(filepath.Join(c.Dir, "r/containers/c/address"), "unix://"+filepath.Join(shimSockets, "..", c.ID))
		kept = append(kept, foreign)
		return c, made
	}
	_, livings := claimed()
	dead, deads := claimed()
	kept = append(kept, livings...)
	kept = append(kept, write(filepath.Join(dir, "sbs", ids.Unmarked()), ""), write(filepath.Join(shimSockets, "other"), ""))
	dead.lock.Close()
	if swept, err := Sweep(); err != nil || !slices.Equal(swept, []string{dead.ID}) {
		t.Fatalf("swept %q, %v", swept, err)
	}
	for _, path := range deads {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("left: %s", path)
		}
	}
	for _, path := range kept {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("removed: %v", err)
		}
	}
}
