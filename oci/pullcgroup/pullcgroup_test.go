package pullcgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/inventory"
	testprogram "github.com/crius-run/crius/test/kit/program"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ driver, parent, want string }{
		{spec.Systemd, "", ""},
		{spec.Systemd, Pod, ""},
		{spec.Systemd, "pulls.slice", ""},
		{spec.Systemd, "node-pulls.slice", ""},
		{spec.Systemd, "/node.slice/node-pulls.slice", ""},
		{spec.Systemd, "/pulls", "must be a slice"},
		{spec.Systemd, "pulls.scope", "must be a slice"},
		{spec.Systemd, "a/pulls.slice", "is not the path of systemd slice"},
		{spec.Systemd, "-.slice.slice", "not a valid systemd slice"},
		{spec.Cgroupfs, "", ""},
		{spec.Cgroupfs, Pod, ""},
		{spec.Cgroupfs, "/pulls", ""},
		{spec.Cgroupfs, "/node/pulls", ""},
		{spec.Cgroupfs, "pulls", "must be an absolute path"},
		{spec.Cgroupfs, "pulls.slice", "must be an absolute path"},
		{spec.Cgroupfs, "/node/../pulls", `must not contain ".."`},
	} {
		err := Config{Driver: c.driver, Parent: c.parent}.Check()
		if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s with %q: %v, want %q in it", c.driver, c.parent, err, c.want)
		}
	}
}

// parent returns the name of a cgroup that nothing else uses. It does not make
// it.
func parent(t *testing.T) string {
	t.Helper()
	owned, err := claim.New()
	must(t, err)
	top := "/" + owned.ID
	t.Cleanup(func() { must(t, errors.Join(cgroup.Remove(context.Background(), top), owned.Release())) })
	return top + "/parent"
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// process starts a process that runs until end is called.
func process(t *testing.T) (pid int, end func()) {
	t.Helper()
	cmd := exec.Command("cat")
	stdin, err := cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	end = func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	}
	t.Cleanup(end)
	return cmd.Process.Pid, end
}

// cgroupsOf returns the cgroups of a process in all hierarchies.
func cgroupsOf(t *testing.T, pid int) (paths []string) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	must(t, err)
	for line := range strings.Lines(string(text)) {
		paths = append(paths, strings.SplitN(strings.TrimSpace(line), ":", 3)[2])
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}

func enter(t *testing.T, g *Groups, pod string, pid int) (leave func()) {
	t.Helper()
	leave, err := g.Enter(t.Context(), pod, pid)
	must(t, err)
	return leave
}

// Processes are in the cgroup in every hierarchy, and it is removed with the
// last of them.
func TestCgroupOfPulls(t *testing.T) {
	t.Parallel()
	top := parent(t)
	g := New(Config{Driver: spec.Cgroupfs, Parent: top})
	want := []string{top + "/crius-pulls"}
	one, endOne := process(t)
	leaveOne := enter(t, g, "/pod", one)
	two, endTwo := process(t)
	leaveTwo := enter(t, g, "", two)
	for _, pid := range []int{one, two} {
		if got := cgroupsOf(t, pid); !slices.Equal(got, want) {
			t.Errorf("process in %q, want %q", got, want)
		}
	}
	endOne()
	leaveOne()
	if users := g.users[want[0]]; users != 1 {
		t.Errorf("%d processes are known to be there, want the other one", users)
	}
	if got := cgroupsOf(t, two); !slices.Equal(got, want) {
		t.Errorf("the other process in %q", got)
	}
	endTwo()
	leaveTwo()
	if left := inventory.Cgroups(want[0]); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// The cgroup of a pod is used in hierarchies where the kubelet has made it, and
// is never made by crius.
func TestCgroupOfPod(t *testing.T) {
	t.Parallel()
	pod := parent(t)
	g := New(Config{Driver: spec.Cgroupfs, Parent: Pod})
	for _, none := range []string{"", pod} {
		pid, end := process(t)
		before := cgroupsOf(t, pid)
		leave := enter(t, g, none, pid)
		if got := cgroupsOf(t, pid); !slices.Equal(got, before) {
			t.Errorf("without a cgroup of its pod: process in %q, want %q", got, before)
		}
		end()
		leave()
		if made := inventory.Cgroups(pod); len(made) > 0 {
			t.Errorf("made: %q", made)
		}
	}
	must(t, cgroup.Make(pod))
	dirs := inventory.Cgroups(pod)
	must(t, os.Remove(dirs[0]))
	pid, end := process(t)
	leave := enter(t, g, strings.TrimPrefix(pod, "/"), pid)
	if got := cgroupsOf(t, pid); !slices.Contains(got, pod+"/crius-pulls") {
		t.Errorf("process in %q", got)
	}
	end()
	leave()
	if left := inventory.Cgroups(pod); !slices.Equal(left, dirs[1:]) {
		t.Errorf("left: %q, want %q", left, dirs[1:])
	}
}

// The next start removes the cgroups of a server that was killed.
func TestRecover(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]func(top string) Config{
		"path": func(top string) Config { return Config{Driver: spec.Cgroupfs, Parent: top} },
		"pod":  func(string) Config { return Config{Driver: spec.Cgroupfs, Parent: Pod} },
	} {
		top := parent(t)
		must(t, cgroup.Make(top))
		g := New(cfg(top))
		pid, end := process(t)
		_ = enter(t, g, top, pid)
		end()
		next := New(cfg(top))
		next.Recover(t.Context(), []string{top, top + "/absent", top})
		if left, _ := cgroup.Below(top, func(string) bool { return true }); len(left) > 0 {
			t.Errorf("%s: left: %q", name, left)
		}
	}
}

// A process that has ended meanwhile leaves nothing.
func TestEnterOfTheDead(t *testing.T) {
	t.Parallel()
	top := parent(t)
	g := New(Config{Driver: spec.Cgroupfs, Parent: top})
	pid, end := process(t)
	end()
	if _, err := g.Enter(t.Context(), "", pid); err == nil {
		t.Error("entered")
	}
	if left := inventory.Cgroups(top + "/crius-pulls"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// systemd is a stand-in for busctl that records its arguments and puts the
// process into a cgroup, unless it fails.
func systemd(t *testing.T, scope string, fails bool) (g *Groups, asked func() []string) {
	t.Helper()
	dir := t.TempDir()
	script := "#!/bin/sh\nfor a; do echo \"$a\"; done >" + dir + "/asked\n"
	if fails {
		script += "echo 'Call failed: Unit exists' >&2; exit 1\n"
	} else {
		own := path.Join("/sys/fs/cgroup", "*", scope, "cgroup.procs")
		script += "while [ $# -gt 0 ]; do [ \"$1\" = PIDs ] && for f in " + own + "; do echo $4 >$f; done; shift; done\n"
	}
	program := filepath.Join(dir, "busctl")
	must(t, testprogram.Write(program, []byte(script)))
	g = New(Config{Driver: spec.Systemd, Parent: Pod})
	g.start = func(ctx context.Context, s scopeUnit) error {
		s.path = scope // the test's own, which nothing else uses
		return bus{program}.start(ctx, s)
	}
	return g, func() []string {
		text, err := os.ReadFile(filepath.Join(dir, "asked"))
		must(t, err)
		return strings.Split(strings.TrimSpace(string(text)), "\n")
	}
}

// With the systemd driver, systemd is asked for a scope in the slice, if the
// pod has one, and the process is in it before it does anything.
func TestScope(t *testing.T) {
	t.Parallel()
	top := parent(t)
	must(t, cgroup.Make(top))
	g, asked := systemd(t, top, false)
	pod := path.Dir(top) + ".slice" // the kubelet makes it
	t.Cleanup(func() { must(t, cgroup.Remove(context.Background(), pod)) })
	gone, endGone := process(t)
	before := cgroupsOf(t, gone)
	leave := enter(t, g, pod, gone)
	if got := cgroupsOf(t, gone); !slices.Equal(got, before) {
		t.Errorf("without a cgroup of its pod: process in %q, want %q", got, before)
	}
	endGone()
	leave()
	must(t, cgroup.Make(pod))
	pid, end := process(t)
	leave = enter(t, g, pod, pid)
	if got := cgroupsOf(t, pid); !slices.Contains(got, top) {
		t.Errorf("process in %q", got)
	}
	said := asked()
	at := slices.Index(said, "ssa(sv)a(sa(sv))")
	if at < 0 || !strings.HasPrefix(said[at+1], "crius-pull-") || !strings.HasSuffix(said[at+1], ".scope") {
		t.Fatalf("asked for %q", said)
	}
	var properties []string
	for i := at + 4; i < len(said)-1; i++ {
		properties = append(properties, said[i])
		i += map[string]int{"s": 2, "b": 2, "au": 3}[said[i+1]]
	}
	if count := fmt.Sprint(len(properties)); said[at+3] != count || said[len(said)-1] != "0" {
		t.Errorf("it has %s properties, and says %s: %q", count, said[at+3], said)
	}
	for _, want := range []string{"\nSlice\ns\n" + path.Base(pod) + "\n", fmt.Sprintf("\nPIDs\nau\n1\n%d\n", pid), "\nCollectMode\ns\ninactive-or-failed\n"} {
		if !strings.Contains(strings.Join(said, "\n"), want) {
			t.Errorf("asked for %q, want %q in it", said, want)
		}
	}
	end()
	leave()
}

// The error contains systemd's message.
func TestScopeFails(t *testing.T) {
	t.Parallel()
	g, _ := systemd(t, "/absent", true)
	pid, _ := process(t)
	g.cfg.Parent = "pulls.slice"
	_, err := g.Enter(t.Context(), "", pid)
	if err == nil || !strings.Contains(err.Error(), "Unit exists") || !strings.Contains(err.Error(), "pulls.slice") {
		t.Error(err)
	}
	g.cfg.Parent = Pod
	if _, err := g.Enter(t.Context(), "/no/slice", pid); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
}

// Without busctl a pull fails and says why.
func TestNoBus(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	cfg := Config{Driver: spec.Systemd, Parent: "pulls.slice"}
	_, err := New(cfg).Enter(t.Context(), "", os.Getpid())
	for _, err := range []error{err, cfg.Ready()} {
		if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "busctl") {
			t.Error(err)
		}
	}
	for _, cfg := range []Config{{Driver: spec.Systemd}, {Driver: spec.Cgroupfs, Parent: "/pulls"}} {
		if err := cfg.Ready(); err != nil {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}
