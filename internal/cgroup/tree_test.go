package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

func TestRemoveBusy(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	child := start(t, cgroup+"/a", "exec sleep 1000")
	if err := Remove(t.Context(), cgroup); !errors.Is(err, fault.Precondition) {
		t.Errorf("with a process: %v, want fault.Precondition", err)
	}
	if pids, err := Procs(cgroup); err != nil || len(pids) != 1 {
		t.Errorf("the process was touched: %v, %v", pids, err)
	}
	timer := time.AfterFunc(20*time.Millisecond, func() { child.Process.Kill() })
	defer timer.Stop()
	remove(t, cgroup) // the process ends while Remove is waiting
}

// A pod may request a parent that is a file of a cgroup. Nothing can be below
// it, and the removal of the pod succeeds.
func TestNothingIsBelowAFile(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	start(t, cgroup, "exec sleep 1000")
	for _, name := range []string{"cgroup.procs", "cgroup.procs/below"} {
		below := cgroup + "/" + name
		if pids, err := Procs(below); err != nil || len(pids) > 0 {
			t.Errorf("processes of %s: %v, %v", name, pids, err)
		}
		if err := Kill(t.Context(), below); err != nil {
			t.Error(err)
		}
		if err := Remove(t.Context(), below); err != nil {
			t.Error(err)
		}
	}
	if pids, err := Procs(cgroup); err != nil || len(pids) != 1 {
		t.Errorf("the process beside it: %v, %v", pids, err)
	}
	if err := Kill(t.Context(), cgroup); err != nil {
		t.Error(err)
	}
	remove(t, cgroup)
}

// A container that may make cgroups can nest them deeper than a path can
// express.
func TestRemoveDeep(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	all := hierarchies(t)
	h := all[len(all)-1]
	if err := h.make(cgroup); err != nil {
		t.Fatal(err)
	}
	dir, err := unix.Open(h.dir(cgroup), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	name := strings.Repeat("n", 200)
	for range 25 {
		if err := unix.Mkdirat(dir, name, 0o755); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(dir, name, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(dir)
		dir = next
	}
	unix.Close(dir)
	remove(t, cgroup)
}

// However deep cgroups are nested, walking them takes a few descriptors.
func TestDeepCgroupsTakeFewDescriptors(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	for _, leaf := range []string{"leaf-1", "leaf-2"} {
		if err := Make(cgroup + strings.Repeat("/d", deep) + "/" + leaf); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), deepEnv+"="+cgroup)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

const deep = 100

func goDeep(cgroup string) error {
	const few = 20 // the Go runtime and the standard streams have a handful of these
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: few, Max: few}); err != nil {
		return err
	}
	found, err := Below(cgroup, func(name string) bool { return strings.HasPrefix(name, "leaf") })
	leaf := cgroup + strings.Repeat("/d", deep) + "/leaf-"
	if want := []string{leaf + "1", leaf + "2"}; err == nil && !slices.Equal(found, want) {
		err = fmt.Errorf("Below finds %q, want %q", found, want)
	}
	_, procs := Procs(cgroup)
	return errors.Join(err, procs, Remove(context.Background(), cgroup))
}

func TestPaths(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"", "a", "a/b", "..", "/..", "/a/../b", "/../../etc", "/a/..", "/a\nb", "/a\x00b"} {
		for verb, err := range map[string]error{
			"Start": Start(bad, nil), "Kill": Kill(t.Context(), bad), "Remove": Remove(t.Context(), bad),
		} {
			if !errors.Is(err, fault.Invalid) {
				t.Errorf("%s(%q) = %v, want fault.Invalid", verb, bad, err)
			}
		}
		if _, err := Procs(bad); !errors.Is(err, fault.Invalid) {
			t.Errorf("Procs(%q) = %v", bad, err)
		}
	}
	for in, want := range map[string]string{"/": "/", "//a/./b/": "/a/b", "/a..b/...": "/a..b/..."} {
		if got, err := clean(in); err != nil || got != want {
			t.Errorf("clean(%q) = %q, %v", in, got, err)
		}
	}
}

func FuzzClean(f *testing.F) {
	for _, seed := range []string{"/", "/a/../b", "//..//", "/a/./b", "a"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, in string) {
		got, err := clean(in)
		if err == nil && (!strings.HasPrefix(got, "/") || !within(filepath.Join("/sys/fs/cgroup", got), "/sys/fs/cgroup")) {
			t.Errorf("clean(%q) = %q", in, got)
		}
	})
}
