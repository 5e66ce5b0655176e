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
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

const (
	joinEnv = "CGROUP_TEST_JOIN" // cgroup that the process is to join
	modeEnv = "CGROUP_TEST_MODE" // layout that the process is to make for itself
)

// The test program is also what the tests put into cgroups: it joins, says so,
// and becomes a shell command.
func TestMain(m *testing.M) {
	if cgroup := os.Getenv(joinEnv); cgroup != "" {
		names := os.Args[2:]
		if err := Join(cgroup, names...); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("joined")
		fmt.Println(Own())
		if err := unix.Exec("/bin/sh", []string{"sh", "-c", os.Args[1]}, os.Environ()); err != nil {
			fmt.Println(err)
		}
		os.Exit(1)
	}
	if mode := os.Getenv(modeEnv); mode != "" {
		if err := pretend(mode); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// pretend hides mounts in the process's own mount namespace, so that the node
// looks as one of another layout.
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
// hierarchies in view.
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

// scratch names a cgroup of the test's own, of which nothing may be left.
func scratch(t testing.TB) string {
	t.Helper()
	cgroup := fmt.Sprintf("/crius-cgroup-test/%d-%d", os.Getpid(), serial.Add(1))
	t.Cleanup(func() {
		for _, h := range hierarchies(t) {
			if _, err := os.Stat(h.dir(cgroup)); err == nil {
				t.Errorf("left behind: %s", h.dir(cgroup))
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := Kill(ctx, cgroup); err != nil {
			t.Error(err)
		}
		if err := Remove(cgroup); err != nil {
			t.Error(err)
		}
		for _, h := range hierarchies(t) {
			os.Remove(h.dir("/crius-cgroup-test")) // if no other test has one in it
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
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "joined" {
		t.Fatalf("child said %q", lines.Text())
	}
	return cmd
}

// populate waits until there are that many processes in cgroup.
func populate(t testing.TB, cgroup string, want int) {
	t.Helper()
	for range 2000 {
		pids, err := Procs(cgroup)
		if err != nil {
			t.Fatal(err)
		}
		if len(pids) >= want {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("there never were %d processes", want)
}

func kill(t testing.TB, cgroup string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := Kill(ctx, cgroup); err != nil {
		t.Fatal(err)
	}
	if pids, err := Procs(cgroup); err != nil || len(pids) != 0 {
		t.Errorf("after Kill: %v, %v", pids, err)
	}
}

func remove(t testing.TB, cgroup string) {
	t.Helper()
	if err := Remove(cgroup); err != nil {
		t.Fatal(err)
	}
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
		cmd := exec.Command("/bin/cat", "/proc/self/cgroup") // as its first deed
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
	if err := Start(one.own, func(*syscall.SysProcAttr) error { return failure }); err != failure {
		t.Errorf("error %v", err)
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
	// What is in one hierarchy only is found and killed nevertheless.
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

func TestKillTree(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	var children []*exec.Cmd
	for _, at := range []string{"/", "/a", "/a/b", "/a/b/c", "/d"} {
		children = append(children, start(t, cgroup+at, "trap '' TERM INT HUP; sleep 1000 & sleep 1000 & wait"))
	}
	kill(t, cgroup)
	for _, c := range children {
		c.Wait()
		if status := c.ProcessState.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGKILL {
			t.Errorf("%s ended with %v", c.Args[1], status)
		}
	}
	kill(t, cgroup) // empty
	for range 2 {
		remove(t, cgroup)
	}
	kill(t, cgroup) // gone
}

// Processes that fork as fast as they can must not outrun the killer.
func TestKillForkers(t *testing.T) {
	t.Parallel()
	for range 5 {
		cgroup := scratch(t)
		// Each generation starts its successor and ends: no pid lives long.
		const hop = `f() { (f &) ; exit; }; f`
		for range 4 {
			start(t, cgroup, hop)
		}
		start(t, cgroup+"/deep/er", `while :; do (sleep 1000 &) ; (exit) ; done & while :; do (true &) ; done`)
		time.Sleep(20 * time.Millisecond) // let them breed
		kill(t, cgroup)
		time.Sleep(5 * time.Millisecond)
		if pids, err := Procs(cgroup); err != nil || len(pids) != 0 {
			t.Errorf("risen again: %v, %v", pids, err)
		}
		remove(t, cgroup)
	}
}

// All that there is is hit by the first strike, and what is born during it.
func TestOneStrike(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	start(t, cgroup, `for i in $(seq 600); do sleep 1000 & done; wait`) // a crowd to hide behind
	for range 8 {                                                       // each generation starts its successor and ends
		start(t, cgroup, `f() { (f &) ; exit; }; f`)
	}
	populate(t, cgroup, 600)
	if _, err := strike(hierarchies(t), cgroup); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		pids, err := Procs(cgroup)
		if err != nil {
			t.Fatal(err)
		}
		if len(pids) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("survived: %v", pids)
			break
		}
		time.Sleep(time.Millisecond)
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

// A paused container (frozen below the cgroup that is killed) dies too.
func TestKillFrozen(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	start(t, cgroup+"/c", "exec sleep 1000")
	frozen := false
	for _, h := range hierarchies(t) {
		for file, value := range map[string]string{"/freezer.state": "FROZEN", "/cgroup.freeze": "1"} {
			frozen = write(h.dir(cgroup+"/c")+file, value) == nil || frozen
		}
	}
	if !frozen {
		t.Fatal("could not freeze")
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

// What cannot be killed is given up when the context ends.
func TestKillGivesUp(t *testing.T) {
	t.Parallel()
	if Detect() == V2 {
		return // where a frozen process can be killed there is none to be had
	}
	cgroup := scratch(t)
	child := start(t, cgroup+"/c", "exec sleep 1000")
	var freezer hierarchy
	for _, h := range hierarchies(t) {
		if h.has("freezer") {
			freezer = h
		}
	}
	state := freezer.dir(cgroup) + "/freezer.state" // above what is killed
	if err := write(state, "FROZEN"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	started := time.Now()
	err := Kill(ctx, cgroup+"/c")
	if !errors.Is(err, fault.Timeout) || !strings.Contains(fmt.Sprint(err), strconv.Itoa(child.Process.Pid)) {
		t.Errorf("%v, want fault.Timeout and the pid %d", err, child.Process.Pid)
	}
	if took := time.Since(started); took > 2*time.Second {
		t.Errorf("took %v", took)
	}
	if err := write(state, "THAWED"); err != nil {
		t.Fatal(err)
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

func TestKillRefusesOwn(t *testing.T) {
	t.Parallel()
	for _, cgroup := range []string{"/", "//", "/./"} {
		if err := Kill(t.Context(), cgroup); !errors.Is(err, fault.Invalid) {
			t.Errorf("Kill(%q) = %v", cgroup, err)
		}
		if err := Remove(cgroup); !errors.Is(err, fault.Invalid) {
			t.Errorf("Remove(%q) = %v", cgroup, err)
		}
	}
	for _, h := range hierarchies(t) {
		if err := Kill(t.Context(), h.own); !errors.Is(err, fault.Invalid) {
			t.Errorf("Kill(%q) = %v", h.own, err)
		}
	}
}

// A pid that has been given to a process outside must not be killed.
func TestSignalChecksMembership(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	stranger := start(t, cgroup+"/other", "exec sleep 1000")
	signal(hierarchies(t), cgroup+"/mine", stranger.Process.Pid)
	signal(hierarchies(t), cgroup+"/oth", stranger.Process.Pid)
	time.Sleep(10 * time.Millisecond)
	if pids, err := Procs(cgroup + "/other"); err != nil || len(pids) != 1 {
		t.Errorf("the stranger was killed: %v, %v", pids, err)
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

func TestRemoveBusy(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	child := start(t, cgroup+"/a", "exec sleep 1000")
	if err := Remove(cgroup); !errors.Is(err, fault.Precondition) {
		t.Errorf("with a process: %v, want fault.Precondition", err)
	}
	if pids, err := Procs(cgroup); err != nil || len(pids) != 1 {
		t.Errorf("the process was touched: %v, %v", pids, err)
	}
	timer := time.AfterFunc(200*time.Millisecond, func() { child.Process.Kill() })
	defer timer.Stop()
	remove(t, cgroup) // the process ends while Remove is waiting
}

// A container that may make cgroups can make them deeper than a path can be.
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

func TestPaths(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"", "a", "a/b", "..", "/..", "/a/../b", "/../../etc", "/a/..", "/a\nb", "/a\x00b"} {
		for verb, err := range map[string]error{
			"Join": Join(bad), "Start": Start(bad, nil), "Kill": Kill(t.Context(), bad), "Remove": Remove(bad),
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

// BenchmarkJoin moves a process to and fro, between the root and a cgroup of
// its own, in one hierarchy at a time and in all of them.
func BenchmarkJoin(b *testing.B) {
	run := func(b *testing.B, names []string) {
		cgroup := scratch(b)
		home := hierarchies(b)
		defer func() {
			for _, h := range home {
				if err := write(h.dir(h.own)+"/cgroup.procs", "0"); err != nil {
					b.Error(err)
				}
			}
			remove(b, cgroup)
		}()
		for b.Loop() {
			if err := errors.Join(Join(cgroup, names...), Join("/", names...)); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(2*b.N), "µs/join")
	}
	for _, h := range hierarchies(b) {
		name := h.names
		if h.v2() {
			name = "unified"
		}
		b.Run(name, func(b *testing.B) { run(b, []string{strings.Split(h.names, ",")[0]}) })
	}
	b.Run("all", func(b *testing.B) { run(b, nil) })
}

// BenchmarkStart compares the ways to get a new process into a new cgroup. The
// pause makes each the first in a while, as on a real node: only the first move
// of a burst waits for the RCU grace period.
func BenchmarkStart(b *testing.B) {
	run := func(b *testing.B, start func(cgroup string, cmd *exec.Cmd) error) {
		var total time.Duration
		for range b.N {
			time.Sleep(100 * time.Millisecond)
			cgroup := scratch(b)
			cmd := exec.Command("/bin/cat")
			stdin, err := cmd.StdinPipe()
			if err != nil {
				b.Fatal(err)
			}
			begin := time.Now()
			if err := start(cgroup, cmd); err != nil {
				b.Fatal(err)
			}
			total += time.Since(begin)
			stdin.Close()
			cmd.Wait()
			remove(b, cgroup)
		}
		b.ReportMetric(float64(total.Microseconds())/float64(b.N), "µs/start")
	}
	b.Run("plain", func(b *testing.B) {
		run(b, func(_ string, cmd *exec.Cmd) error { return cmd.Start() })
	})
	b.Run("born", func(b *testing.B) {
		run(b, func(cgroup string, cmd *exec.Cmd) error {
			return Start(cgroup, func(attr *syscall.SysProcAttr) error {
				cmd.SysProcAttr = attr
				return cmd.Start()
			})
		})
	})
	b.Run("moved", func(b *testing.B) {
		run(b, func(cgroup string, cmd *exec.Cmd) error {
			if err := cmd.Start(); err != nil {
				return err
			}
			for _, h := range hierarchies(b) {
				if err := errors.Join(h.make(cgroup), write(h.dir(cgroup)+"/cgroup.procs", strconv.Itoa(cmd.Process.Pid))); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

func BenchmarkFind(b *testing.B) {
	for b.Loop() {
		if _, _, err := find(); err != nil {
			b.Fatal(err)
		}
	}
}

func TestList(t *testing.T) {
	t.Parallel()
	if got := list([]int{1, 2, 3}); got != "1 2 3" {
		t.Error(got)
	}
	if got := list(slices.Repeat([]int{7}, 10)); !bytes.HasSuffix([]byte(got), []byte("7 7 and 2 more")) {
		t.Error(got)
	}
}
