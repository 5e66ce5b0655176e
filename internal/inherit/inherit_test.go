package inherit

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/odd"
)

// server makes the test program act as a server that starts one process.
const server = "INHERIT_SERVER"

func TestMain(m *testing.M) {
	odd.Main()
	if os.Getenv(server) != "" {
		if err := serve(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// serve prints what the process started by argv inherits.
func serve(argv []string) error {
	syscall.Umask(Umask)
	before, err := odd.Of(os.Getpid())
	if err != nil {
		return err
	}
	left := Process()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir, cmd.Env, cmd.Stderr = "/", Environ(), os.Stderr
	if err := Start(cmd.Run); err != nil {
		return err
	}
	after, err := odd.Of(os.Getpid())
	if err != nil {
		return err
	}
	for _, own := range []string{"scheduling", "I/O priority", "timerslack_ns", "personality", "Cpus_allowed_list"} {
		if before[own] != after[own] && !strings.Contains(after[own], "not permitted") {
			return fmt.Errorf("%s of the server was %s and is %s", own, before[own], after[own])
		}
	}
	return json.NewEncoder(os.Stdout).Encode(left)
}

// The kernel says only that a resource is temporarily unavailable.
func TestStartWithoutRoom(t *testing.T) {
	t.Parallel()
	full := &os.PathError{Op: "fork/exec", Path: "/usr/sbin/runc", Err: syscall.EAGAIN}
	if err := Start(func() error { return full }); !errors.Is(err, fault.Exhausted) || !errors.Is(err, syscall.EAGAIN) || !strings.Contains(err.Error(), "pids.max") {
		t.Error(err)
	}
	if err := Start(func() error { return syscall.ENOENT }); !errors.Is(err, syscall.ENOENT) || errors.Is(err, fault.Exhausted) {
		t.Error(err)
	}
}

// Most programs start and then fail, since they need threads.
func TestProgramWithoutRoom(t *testing.T) {
	t.Parallel()
	failed := errors.New("exit status 2")
	for said, want := range map[string]bool{
		"runtime: failed to create new OS thread (have 5 already; errno=11)\nruntime: may need to increase max user processes (ulimit -u)\nfatal error: newosproc\n": true,
		"runtime/cgo: pthread_create failed: Resource temporarily unavailable\nSIGABRT: abort\n":                                                                     true,
		`{"code": 999, "msg": "netplugin failed with no error message: fork/exec /usr/lib/cni/host-local: resource temporarily unavailable"}`:                        true,
		"runtime: failed to create new OS thread (have 5 already; errno=12)\n":                                                                                       false,
		"read unix @: resource temporarily unavailable":                                                                                                              false,
		"": false,
	} {
		err := ExplainOutput(failed, said)
		if !errors.Is(err, failed) || errors.Is(err, fault.Exhausted) != want || strings.Contains(err.Error(), "pids.max") != want || strings.Contains(err.Error(), "SIGABRT") {
			t.Errorf("%q: %v", said, err)
		}
		if again := ExplainOutput(err, said); want && again.Error() != err.Error() {
			t.Errorf("explained twice: %v", again)
		}
		if err := ExplainOutput(nil, said); err != nil {
			t.Errorf("a program that has not failed: %v", err)
		}
	}
}

// The message names the limit that is reached, and not all that there are.
func TestLimitReached(t *testing.T) {
	t.Parallel()
	for want, files := range map[string]map[string]string{
		"": {"proc/self/cgroup": "0::/a/b\n", "proc/loadavg": "0.1 0.2 0.3 1/900 77", "proc/sys/kernel/pid_max": "32768\n", "proc/sys/kernel/threads-max": "30000\n",
			"sys/fs/cgroup/a/b/pids.max": "max\n", "sys/fs/cgroup/a/b/pids.current": "890\n", "sys/fs/cgroup/a/pids.max": "910\n", "sys/fs/cgroup/a/pids.current": "893\n"},
		"the cgroup /a has as many processes and threads as it may have (893 of pids.max 900)": {"proc/self/cgroup": "1:name=systemd:/x\n0::/a/b\n", "proc/loadavg": "0.1 0.2 0.3 1/900 77", "proc/sys/kernel/pid_max": "900\n",
			"sys/fs/cgroup/a/b/pids.max": "max\n", "sys/fs/cgroup/a/b/pids.current": "890\n", "sys/fs/cgroup/a/pids.max": "900\n", "sys/fs/cgroup/a/pids.current": "893\n"},
		"the cgroup / has as many processes and threads as it may have (99 of pids.max 100)":          {"proc/self/cgroup": "8:pids:/\n0::/\n", "sys/fs/cgroup/pids/pids.max": "100\n", "sys/fs/cgroup/pids/pids.current": "99\n"},
		"the node has as many processes and threads as it may have (1020 of kernel.pid_max 1024)":     {"proc/loadavg": "0.1 0.2 0.3 1/1020 77", "proc/sys/kernel/pid_max": "1024\n", "proc/sys/kernel/threads-max": "1024\n"},
		"the node has as many processes and threads as it may have (1020 of kernel.threads-max 1020)": {"proc/loadavg": "0.1 0.2 0.3 1/1020 77", "proc/sys/kernel/pid_max": "4194304\n", "proc/sys/kernel/threads-max": "1020\n"},
	} {
		root := t.TempDir() + "/"
		for name, text := range files {
			if err := errors.Join(os.MkdirAll(filepath.Dir(root+name), 0o700), os.WriteFile(root+name, []byte(text), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		if got := limitReached(root); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// inherited returns what a process started by a server inherits, and what the
// server reports as not reset. prepared are shell commands that run before the
// server starts.
func inherited(t *testing.T, oddly bool, prepared string) (state odd.State, left []string) {
	t.Helper()
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	write := func(name, script string, err error) string {
		t.Helper()
		if err := errors.Join(err, os.WriteFile(file(name), []byte(script), 0o600)); err != nil {
			t.Fatal(err)
		}
		return file(name)
	}
	if oddly {
		write("odd", "", nil)
	}
	script, err := odd.Wrapper(os.Args[0], file("odd"))
	wrapper := write("wrapper", script, err)
	script, err = odd.Reporter(file("state"))
	cmd := exec.Command("sh", "-c", prepared+` sh "$@"`, "sh", wrapper, "sh", write("reporter", script, err))
	cmd.Env = append(os.Environ(), server+"=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(out, &left)
	}
	if err != nil {
		t.Fatalf("server: %v", err)
	}
	if state, err = odd.Read(file("state")); err != nil {
		t.Fatal(err)
	}
	delete(state, "environment") // the operator's choice
	return state, left
}

func TestProcessesInheritNothingOdd(t *testing.T) {
	t.Parallel()
	plain, left := inherited(t, false, "exec")
	for what, state := range map[string]func() (odd.State, []string){
		"everything": func() (odd.State, []string) { return inherited(t, true, "exec") },
		"SCHED_RR":   func() (odd.State, []string) { return inherited(t, false, "exec chrt --rr 10") },
	} {
		got, oddLeft := state()
		if !slices.Equal(left, oddLeft) {
			t.Errorf("%s: cannot be reset: %q, on a plain server %q", what, oddLeft, left)
		}
		for name, want := range plain {
			if got[name] != want {
				t.Errorf("%s: %s is %q, want %q", what, name, got[name], want)
			}
		}
		for name, value := range got {
			if _, ok := plain[name]; !ok {
				t.Errorf("%s: %s is %q, want none", what, name, value)
			}
		}
	}
}

// A server without the capabilities reports what is left, and starts the process.
func TestWhatCannotBeResetIsReported(t *testing.T) {
	t.Parallel()
	_, before := inherited(t, false, "exec")
	state, left := inherited(t, false, "ulimit -s 1000; exec nice -n 3 setpriv --bounding-set=-sys_resource,-sys_nice --no-new-privs")
	for _, want := range []string{"stack size limit: 1024000 instead of unlimited", "scheduling policy and nice value: policy 0, nice 3", "no_new_privs"} {
		reported := func(s string) bool { return strings.HasPrefix(s, want) }
		if !slices.ContainsFunc(left, reported) || slices.ContainsFunc(before, reported) {
			t.Errorf("%q must be among %q and not among %q", want, left, before)
		}
	}
	if got := state["scheduling"]; !strings.HasPrefix(got, "policy 0, nice 3,") {
		t.Errorf("the process has %s", got)
	}
}

func BenchmarkStart(b *testing.B) {
	for name, start := range map[string]func(func() error) error{
		"plain":     func(start func() error) error { return start() },
		"inherited": Start,
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				cmd := exec.Command("/bin/true")
				if err := start(cmd.Start); err != nil {
					b.Fatal(err)
				}
				if err := cmd.Wait(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
