package cgroup

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/claim"
	"github.com/crius-run/crius/test/kit/wait"
)

const (
	joinEnv = "CGROUP_TEST_JOIN" // cgroup for the process to join
	modeEnv = "CGROUP_TEST_MODE" // layout for the process to imitate
	deepEnv = "CGROUP_TEST_DEEP" // cgroup for the process to walk with few descriptors
	execEnv = "CGROUP_TEST_EXEC" // has the process execute this program again and again
	exitEnv = "CGROUP_TEST_EXIT" // has the process end while it has many threads
	loseEnv = "CGROUP_TEST_LOSE" // cgroup for the process to join before it ends its main thread
)

// Only the main thread can end itself, or all others, and only in init is the program
// certain to run on it.
func init() { //nolint:gochecknoinits // see above
	if os.Getenv(loseEnv) != "" || os.Getenv(exitEnv) != "" {
		runtime.LockOSThread()
	}
}

// The test program is also the process that tests put into cgroups: it joins,
// reports that, and becomes a shell command.
func TestMain(m *testing.M) {
	if cgroup := os.Getenv(joinEnv); cgroup != "" {
		names := os.Args[2:]
		if err := join(cgroup, names...); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		own, err := Own()
		// The shell reports it: while Go's threads end during exec, the kernel
		// considers the process dead, and shows dead ones in the root of v1
		// hierarchies.
		script := fmt.Sprintf("echo joined; echo '%s %v'; %s", own, err, os.Args[1])
		if err := unix.Exec("/bin/sh", []string{"sh", "-c", script}, os.Environ()); err != nil {
			fmt.Println(err)
		}
		os.Exit(1)
	}
	if program := os.Getenv(execEnv); program != "" {
		fmt.Println(unix.Exec(program, os.Args, os.Environ()))
		os.Exit(1)
	}
	if os.Getenv(exitEnv) != "" {
		var begun sync.WaitGroup
		for range 100 {
			begun.Add(1)
			go func() {
				begun.Done()
				_, _ = unix.Select(0, nil, nil, nil, nil)
			}()
		}
		begun.Wait()
		os.Exit(0)
	}
	if cgroup := os.Getenv(loseEnv); cgroup != "" {
		if err := join(cgroup); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("joined")
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
	}
	if cgroup := os.Getenv(deepEnv); cgroup != "" {
		if err := goDeep(cgroup); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if mode := os.Getenv(modeEnv); mode != "" {
		if err := pretend(mode); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	owned, err := claim.New()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	scratchTop = "/" + owned.ID
	code := m.Run()
	// Not earlier: a test that makes a cgroup in it would find it gone.
	if err := errors.Join(Remove(context.Background(), scratchTop), owned.Release()); err != nil {
		fmt.Fprintln(os.Stderr, "test cgroups left:", err)
		code = 1
	}
	os.Exit(code)
}

// scratchTop holds the cgroups of this process's tests.
var scratchTop string

// pretend hides mounts in the process's own mount namespace, so that the node
// appears to have another layout.
func pretend(mode string) error {
	all, _, err := find()
	if err != nil {
		return err
	}
	for _, h := range all {
		if h.v2() == (mode == "V1") {
			if err := unix.Unmount(h.point, unix.MNT_DETACH); err != nil {
				return err
			}
		}
	}
	if got := fmt.Sprintf("V%d", map[Mode]int{V1: 1, V2: 2}[Detect()]); got != mode {
		return fmt.Errorf("the node looks like %s, not %s", got, mode)
	}
	return nil
}

// On a hybrid node the whole test runs again with only its v1 and only its v2
// hierarchies visible.
func TestOtherLayouts(t *testing.T) {
	if Detect() != Hybrid {
		return
	}
	for _, mode := range []string{"V1", "V2"} {
		t.Run(mode, func(t *testing.T) {
			run := exec.Command("/proc/self/exe", "-test.skip=TestOtherLayouts", "-test.run=^Test")
			run.Env = append(os.Environ(), modeEnv+"="+mode)
			run.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
			if out, err := run.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

var serial atomic.Int64

// scratch returns the name of a cgroup of the test's own, which must be gone at
// its end.
func scratch(t testing.TB) string {
	t.Helper()
	cgroup := fmt.Sprintf("%s/%d", scratchTop, serial.Add(1))
	t.Cleanup(func() {
		for _, h := range hierarchies(t) {
			if _, err := os.Stat(h.dir(cgroup)); err == nil {
				t.Errorf("left behind: %s", h.dir(cgroup))
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), wait.Limit)
		defer cancel()
		if err := Kill(ctx, cgroup); err != nil {
			t.Error(err)
		}
		if err := Remove(context.Background(), cgroup); err != nil {
			t.Error(err)
		}
	})
	return cgroup
}

func hierarchies(t testing.TB) []hierarchy {
	t.Helper()
	all, _, err := find()
	if err != nil || len(all) == 0 {
		t.Fatalf("hierarchies %v, %v", all, err)
	}
	return all
}

// start runs a shell script in cgroup.
func start(t testing.TB, cgroup, script string, names ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", append([]string{script}, names...)...)
	cmd.Env = append(os.Environ(), joinEnv+"="+cgroup)
	run(t, cgroup, cmd)
	return cmd
}

// run starts a command that joins cgroup.
func run(t testing.TB, cgroup string, cmd *exec.Cmd) {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		thaw(hierarchies(t), cgroup) // a test that failed may have left it frozen, and then it cannot die
		cmd.Wait()
	})
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "joined" {
		t.Fatalf("child said %q", lines.Text())
	}
}

func kill(t testing.TB, cgroup string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wait.Limit)
	defer cancel()
	if err := Kill(ctx, cgroup); err != nil {
		t.Fatal(err)
	}
	if pids, err := Procs(cgroup); err != nil || len(pids) != 0 {
		t.Errorf("after Kill: %v, %v", pids, err)
	}
}

// remove removes a cgroup whose processes end soon.
func remove(t testing.TB, cgroup string) {
	t.Helper()
	wait.For(t, "the cgroup to be removed", func() bool {
		err := Remove(t.Context(), cgroup)
		if err != nil && !errors.Is(err, fault.Precondition) {
			t.Fatal(err)
		}
		return err == nil
	})
}

// join moves the calling process into a cgroup, in hierarchies as Start.
func join(cgroup string, names ...string) error {
	all, _, err := find()
	if err != nil {
		return err
	}
	cgroup = path.Clean(cgroup)
	for _, h := range moves(all, cgroup, names) {
		if err := h.make(cgroup); err != nil {
			return err
		}
		if err := write(h.dir(cgroup)+"/cgroup.procs", "0"); err != nil {
			return err
		}
	}
	return nil
}

func TestJoin(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	leaf := cgroup + "/a/b"
	child := start(t, leaf+"/./", "exec sleep 1000")
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", child.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	in := memberships(string(text))
	for _, h := range hierarchies(t) {
		if !slices.ContainsFunc(in, func(m membership) bool { return m.names == h.names && strings.HasSuffix(m.own, leaf) }) {
			t.Errorf("%q: not in %s: %+v", h.names, leaf, in)
		}
	}
	for _, of := range []string{leaf, cgroup, cgroup + "/a"} {
		if pids, err := Procs(of); err != nil || !slices.Equal(pids, []int{child.Process.Pid}) {
			t.Errorf("Procs(%s) = %v, %v; want %d", of, pids, err, child.Process.Pid)
		}
	}
	for _, of := range []string{cgroup + "/a/b/c", cgroup + "/a/bc"} {
		if pids, err := Procs(of); err != nil || len(pids) != 0 {
			t.Errorf("Procs(%s) = %v, %v", of, pids, err)
		}
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

func TestStart(t *testing.T) {
	t.Parallel()
	all := hierarchies(t)
	one := all[0]
	some, _, _ := strings.Cut(one.names, ",")
	for _, names := range [][]string{nil, {some}} {
		cgroup := scratch(t) + "/new"
		cmd := exec.Command("/bin/cat", "/proc/self/cgroup") // as its first action
		var out bytes.Buffer
		cmd.Stdout = &out
		err := Start(cgroup, func(attr *syscall.SysProcAttr) error {
			attr.Setsid = true
			cmd.SysProcAttr = attr
			return cmd.Start()
		}, names...)
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
		in := memberships(out.String())
		for _, h := range all {
			there := slices.ContainsFunc(in, func(m membership) bool { return m.names == h.names && strings.HasSuffix(m.own, cgroup) })
			if want := names == nil || h.point == one.point; there != want {
				t.Errorf("names %q: in %s of %q: %v", names, cgroup, h.names, there)
			}
		}
		if after := hierarchies(t); !slices.Equal(after, all) {
			t.Errorf("the caller went from %v to %v", all, after)
		}
		remove(t, path.Dir(cgroup))
	}
	failure := errors.New("told")
	if err := Start(one.own, func(*syscall.SysProcAttr) error { return failure }); !errors.Is(err, failure) {
		t.Errorf("error %v", err)
	}
}

func TestMake(t *testing.T) {
	t.Parallel()
	top := scratch(t)
	for range 2 { // existing ones are no error
		if err := Make(top + "/a"); err != nil {
			t.Fatal(err)
		}
	}
	for _, h := range hierarchies(t) {
		if _, err := os.Stat(h.dir(top + "/a")); err != nil {
			t.Errorf("%q: %v", h.names, err)
		}
	}
	if err := Make("a/../b"); !errors.Is(err, fault.Invalid) {
		t.Errorf("a path that is none: %v", err)
	}
	if err := Remove(t.Context(), top); err != nil {
		t.Error(err)
	}
}

func TestJoinSome(t *testing.T) {
	t.Parallel()
	all := hierarchies(t)
	one := all[len(all)-1]
	name, _, _ := strings.Cut(one.names, ",")
	cgroup := scratch(t)
	child := start(t, cgroup, "exec sleep 1000", name, "no-such-controller")
	for _, h := range all {
		_, err := os.Stat(h.dir(cgroup))
		if (err == nil) != (h.point == one.point) {
			t.Errorf("%q: %v after joining %q only", h.names, err, name)
		}
	}
	// A process in only one hierarchy is nevertheless found and killed.
	if pids, err := Procs(cgroup); err != nil || !slices.Equal(pids, []int{child.Process.Pid}) {
		t.Errorf("Procs = %v, %v", pids, err)
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

func TestNoNeedlessMove(t *testing.T) {
	t.Parallel()
	all := []hierarchy{
		{membership{"memory", "/pod/c"}, "/m", "/"},
		{membership{"cpu,cpuacct", "/pod"}, "/c", "/"},
		{membership{"", "/pod/c"}, "/u", "/"},
		{membership{"pids", "/"}, "/p", "/"},
	}
	for _, c := range []struct {
		names []string
		want  string
	}{
		{nil, "/c /p"},
		{[]string{"cpuacct"}, "/c"},
		{[]string{"memory", ""}, ""},
		{[]string{"pids", "memory"}, "/p"},
	} {
		var got []string
		for _, h := range moves(all, "/pod/c", c.names) {
			got = append(got, h.point)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("names %q: moves %q, want %q", c.names, got, c.want)
		}
	}
	if len(moves(all, "/pod/c", nil)) != 2 || all[0].point != "/m" {
		t.Error("moves changed its argument")
	}
}

func TestOwn(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	child := exec.Command("/proc/self/exe", "true", "", "name=systemd", "memory")
	child.Env = append(os.Environ(), joinEnv+"="+cgroup)
	out, err := child.Output()
	if want := "joined\n" + cgroup + " <nil>\n"; err != nil || string(out) != want {
		t.Errorf("%v: %q, want %q", err, out, want)
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

// OOM kills are counted where a container's processes are: crun has its containers one below
// their systemd scopes.
func TestOOMKills(t *testing.T) {
	t.Parallel()
	for asked, of := range map[string]string{"/plain": "/plain", "/flat.scope": "/flat.scope", "/deep.scope": "/deep.scope/container"} {
		top := scratch(t)
		cgroup := top + of
		start(t, cgroup, "exec sleep 1000")
		if n := OOMKills(top + asked); n != 0 {
			t.Errorf("%s: %d kills before there was any", asked, n)
		}
		limited := WriteFile(cgroup, "memory.limit_in_bytes", "16777216") == nil || WriteFile(cgroup, "memory.max", "16777216") == nil
		if limited { // there is a memory controller
			start(t, cgroup, "exec tail /dev/zero") // which keeps all of the endless line
			wait.For(t, "the OOM killer, in "+asked, func() bool { return OOMKills(top+asked) > 0 })
		}
		kill(t, top)
		remove(t, top)
	}
}
