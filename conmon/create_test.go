package conmon_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/wait"
)

// fake replaces the runtime with a shell script, which gets the real one's
// arguments.
func (c *container) fake(script string) {
	c.Helper()
	path := filepath.Join(c.Dir, "runtime")
	if err := program.Write(path, []byte("#!/bin/sh\n"+script+"\n")); err != nil {
		c.Fatal(err)
	}
	c.Runtime[0] = path
}

// checkNothing checks that a failed create has left no process and no socket.
func (c *container) checkNothing() {
	c.Helper()
	for _, name := range []string{"monitor.sock", "console.sock"} {
		if _, err := os.Lstat(filepath.Join(c.Dir, name)); !errors.Is(err, os.ErrNotExist) {
			c.Errorf("%s is left: %v", name, err)
		}
	}
	for _, pid := range c.mentioning() {
		command, _ := os.ReadFile(fmt.Sprintf("/proc/%s/cmdline", pid))
		c.Errorf("process %s is left: %q", pid, command)
	}
	if processes, err := conmon.ReadProcesses(c.Dir); err == nil && conmon.Alive(processes.Monitor) {
		c.Error("the monitor is left")
	}
}

// mentioning lists the processes whose command line or working directory names
// the container's directory.
func (c *container) mentioning() (pids []string) {
	c.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		c.Fatal(err)
	}
	for _, e := range entries {
		command, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		dir, _ := os.Readlink("/proc/" + e.Name() + "/cwd")
		if e.Name()[0] <= '9' && (strings.Contains(string(command), c.Dir) || dir == c.Dir) {
			pids = append(pids, e.Name())
		}
	}
	return pids
}

func TestRuntimeFails(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		script  string
		prepare func(c *container)
		code    int
		message string // a part of it
	}{
		"with a word":            {script: "echo no such thing >&2; exit 3", code: 3, message: "no such thing"},
		"on the wrong stream":    {script: "echo wrong stream; exit 4", code: 4, message: "wrong stream"},
		"without output":         {script: "exit 5", code: 5, message: "exit code 5 without output"},
		"by a signal":            {script: "kill -SEGV $$", code: 139, message: "killed by signal 11"},
		"with garbage":           {script: `printf '\377\376 not \303 text' >&2; exit 6`, code: 6, message: "\uFFFD\uFFFD not \uFFFD text"},
		"with a flood":           {script: "yes flood | head -c 3000000 >&2; echo last words >&2; exit 7", code: 7, message: "flood\nflood\nlast words"},
		"with a flood elsewhere": {script: "yes flood | head -c 3000000; echo reason >&2; exit 7", code: 7, message: "reason"},
		"leaving children":       {script: `cd "${0%/*}"; (setsid sleep 1000 & sleep 1000 &) ; echo children >&2; exit 8`, code: 8, message: "children"},
		"leaving deaf children":  {script: `cd "${0%/*}"; trap '' TERM HUP; sleep 1000 & echo deaf >&2; exit 8`, code: 8, message: "deaf"},
		"without a pid file":     {script: "exit 0", message: "pid: no such file"},
		"with a bad pid file":    {script: `echo 12x > "${0%/*}/pid"`, message: "holds no pid"},
		"with an empty pid file": {script: `> "${0%/*}/pid"`, message: "holds no pid"},
		"with pid 0":             {script: `echo 0 > "${0%/*}/pid"`, message: "holds no pid"},
		"with a foreign pid":     {script: `echo 1 > "${0%/*}/pid"`, message: "is not a child"},
		"with a dead pid":        {script: `echo 999999999 > "${0%/*}/pid"`, message: "is not a child"},
		"with a stale pid file":  {script: "exit 0", prepare: stalePidFile, message: "pid: no such file"},
		"without a terminal":     {script: `cd "${0%/*}"; sleep 1000 & echo $! > "${0%/*}/pid"`, prepare: func(c *container) { c.Terminal = true }, message: "console socket"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newContainer(t, "crun")
			c.fake(test.script)
			if test.prepare != nil {
				test.prepare(c)
			}
			client, err := c.tryLaunch(limit(t))
			var failed *conmon.CreateError
			if client != nil || !errors.As(err, &failed) {
				t.Fatalf("client %v, error %v", client, err)
			}
			if failed.ExitCode != test.code || !strings.Contains(failed.Message, test.message) {
				t.Errorf("code %d, message %q", failed.ExitCode, failed.Message)
			}
			if len(failed.Message) > 9000 || !utf8.ValidString(failed.Message) {
				t.Errorf("message of %d bytes: %q", len(failed.Message), failed.Message)
			}
			c.checkNothing()
		})
	}
}

func stalePidFile(c *container) {
	if err := os.WriteFile(c.PidFile, []byte(fmt.Sprint(os.Getpid())), 0o600); err != nil {
		c.Fatal(err)
	}
}

func TestRealRuntimeFails(t *testing.T) {
	everyRuntime(t, func(t *testing.T, runtime string) {
		c := newContainer(t, runtime)
		c.ociProcess()["args"] = []string{"/no/such/program"}
		_, err := c.tryLaunch(limit(t))
		var failed *conmon.CreateError
		if !errors.As(err, &failed) || failed.ExitCode != 1 || !strings.Contains(failed.Message, "/no/such/program") {
			t.Errorf("error %v", err)
		}
		c.checkNothing()
	})
}

// A create that does not end is ended with the context: the runtime, its
// processes and the monitor.
func TestRuntimeHangs(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]string{
		"and sleeps":     `>begun; sleep 1000`,
		"and is deaf":    `trap '' TERM INT HUP; >begun; while :; do sleep 1; done`,
		"and has begun":  `(setsid sh -c "trap '' TERM; >begun; sleep 1000 & sleep 1000" &); sleep 1000`,
		"and floods":     `>begun; yes >&2`,
		"and is stopped": `>begun; kill -STOP $$`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newContainer(t, "crun")
			c.fake(`cd "${0%/*}"; ` + script)
			why := errors.New("the test is impatient")
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			launched := make(chan error, 1)
			go func() {
				client, err := c.tryLaunch(ctx)
				if client != nil {
					t.Errorf("client %v", client)
				}
				launched <- err
			}()
			wait.For(t, "the runtime to begin", func() bool { _, err := os.Stat(filepath.Join(c.Dir, "begun")); return err == nil })
			cancel(why)
			if err := <-launched; !errors.Is(err, why) {
				t.Errorf("error %v", err)
			}
			c.checkNothing()
		})
	}
}

// A program that is no proper monitor does no harm either.
func TestBadMonitor(t *testing.T) {
	t.Parallel()
	script := func(text string) func(c *container) {
		return func(c *container) {
			c.Monitor = filepath.Join(c.Dir, "monitor")
			if err := program.Write(c.Monitor, []byte("#!/bin/sh\n"+text)); err != nil {
				c.Fatal(err)
			}
		}
	}
	for name, test := range map[string]struct {
		prepare func(c *container)
		limit   time.Duration
		want    error
		message string
	}{
		"missing":    {func(c *container) { c.Monitor = "/no/such/monitor" }, wait.Limit, os.ErrNotExist, "/no/such/monitor"},
		"dies":       {script("echo some trouble >&2; exit 1"), wait.Limit, conmon.ErrLost, "some trouble"},
		"is silent":  {script("exit 0"), wait.Limit, conmon.ErrLost, "without output"},
		"never ends": {script("exec sleep 1000"), 300 * time.Millisecond, context.DeadlineExceeded, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newContainer(t, "crun")
			test.prepare(c)
			ctx, cancel := context.WithTimeout(t.Context(), test.limit)
			defer cancel()
			client, err := c.tryLaunch(ctx)
			if client != nil || !errors.Is(err, test.want) || !strings.Contains(fmt.Sprint(err), test.message) {
				t.Errorf("client %v, error %v", client, err)
			}
			c.checkNothing()
		})
	}
}

func TestBadSpec(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(s *conmon.Spec){
		"no id":               func(s *conmon.Spec) { s.ID = "" },
		"path in the id":      func(s *conmon.Spec) { s.ID = "../x" },
		"quote in the id":     func(s *conmon.Spec) { s.ID = `a"b` },
		"option as id":        func(s *conmon.Spec) { s.ID = "--root" },
		"long id":             func(s *conmon.Spec) { s.ID = strings.Repeat("a", 200) },
		"relative directory":  func(s *conmon.Spec) { s.Dir = "here" },
		"no exit file":        func(s *conmon.Spec) { s.ExitFile = "" },
		"no pid file":         func(s *conmon.Spec) { s.PidFile = "" },
		"relative log":        func(s *conmon.Spec) { s.LogFile = "log" },
		"NUL in a path":       func(s *conmon.Spec) { s.LogFile = "/tmp/\x00" },
		"long directory":      func(s *conmon.Spec) { s.Dir = "/" + strings.Repeat("d", 100) },
		"no runtime":          func(s *conmon.Spec) { s.Runtime = nil },
		"no monitor":          func(s *conmon.Spec) { s.Monitor = "" },
		"relative monitor":    func(s *conmon.Spec) { s.Monitor = "crius-conmon" },
		"cgroup out of bound": func(s *conmon.Spec) { s.Cgroup = "/a/../.." },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newContainer(t, "crun", "sleep")
			good := c.Spec
			spoil(&c.Spec)
			client, err := conmon.Launch(limit(t), c.Spec)
			if client != nil || !errors.Is(err, fault.Invalid) {
				t.Errorf("client %v, error %v", client, err)
			}
			c.Spec = good
			c.checkNothing()
		})
	}
	c := newContainer(t, "crun", "sleep")
	c.Runtime[0] = "no-such-runtime"
	if _, err := conmon.Launch(t.Context(), c.Spec); !errors.Is(err, fault.Unavailable) {
		t.Errorf("missing runtime: %v", err)
	}
}

// The log is a regular file at its path or there is none.
func TestBadLog_CVE_2025_0750(t *testing.T) {
	t.Parallel()
	outside := filepath.Join(t.TempDir(), "outside")
	t.Cleanup(func() { // when all cases have run
		if _, err := os.Lstat(outside); err == nil {
			t.Error("a symbolic link was followed")
		}
	})
	for name, prepare := range map[string]func(path string) error{
		"symlink":          func(path string) error { return os.Symlink(outside, path) },
		"fifo":             func(path string) error { return unix.Mkfifo(path, 0o600) },
		"fifo with reader": fifoWithReader(t),
		"directory":        func(path string) error { return os.Mkdir(path, 0o700) },
		"device":           func(path string) error { return unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))) },
		"nowhere":          func(path string) error { return os.Remove(filepath.Dir(path)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newContainer(t, "crun", "echo", "hello")
			c.LogFile = filepath.Join(t.TempDir(), "log")
			if err := prepare(c.LogFile); err != nil {
				t.Fatal(err)
			}
			_, err := c.tryLaunch(limit(t))
			var failed *conmon.CreateError
			if !errors.As(err, &failed) || !strings.Contains(failed.Message, "open log "+c.LogFile) {
				t.Errorf("error %v", err)
			}
			c.checkNothing()
		})
	}
}

func fifoWithReader(t *testing.T) func(path string) error {
	return func(path string) error {
		err := unix.Mkfifo(path, 0o600)
		if err != nil {
			return err
		}
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		t.Cleanup(func() { unix.Close(fd) })
		return err
	}
}

// The attributes of the monitor process, and those that it passes to the
// runtime.
func TestMonitorProcessAttributes(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "/run/notify")
	t.Setenv("LISTEN_FDS", "1")
	t.Setenv("KATA_CONF_FILE", "/etc/kata")
	t.Setenv("GOGC", "100")
	c := newContainer(t, "crun", "sleep")
	// A runtime that records its environment before it does its work.
	c.fake(`{ env; cat /proc/self/status; ls -l /proc/self/fd; } > "${0%/*}/notes"; exec crun "$@"`)
	client := c.launch()
	text, err := os.ReadFile(filepath.Join(c.Dir, "notes"))
	if err != nil {
		t.Fatal(err)
	}
	notes := string(text)
	for _, unwanted := range []string{"NOTIFY_SOCKET", "LISTEN_FDS", "GOMAXPROCS", "GOMEMLIMIT", "disablethp", "GOGC=off", " 3 ->", " 4 ->", "socket:"} {
		if strings.Contains(strings.ReplaceAll(notes, " 3 -> /proc/", ""), unwanted) {
			t.Errorf("the runtime sees %s", unwanted)
		}
	}
	for _, wanted := range []string{"KATA_CONF_FILE=/etc/kata", "GOGC=100", "PATH=", "SigIgn:\t0000000000000000", "SigBlk:\t0000000000000000", "Umask:\t0022"} {
		if !strings.Contains(notes, wanted) {
			t.Errorf("the runtime does not see %s but\n%s", wanted, notes)
		}
	}

	monitor := c.processes().Monitor
	if sid, err := unix.Getsid(monitor.PID); err != nil || sid != monitor.PID {
		t.Errorf("session %d, %v", sid, err)
	}
	cgroups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", monitor.PID))
	for line := range strings.Lines(string(cgroups)) {
		if !strings.HasSuffix(strings.TrimSpace(line), ":"+c.Cgroup) {
			t.Errorf("cgroup %s", line)
		}
	}
	// The lowest score that this process could set for itself.
	lowest, _ := exec.Command("sh", "-c", "echo -1000 > /proc/self/oom_score_adj; cat /proc/self/oom_score_adj").Output()
	if score, _ := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", monitor.PID)); string(score) != string(lowest) {
		t.Errorf("oom_score_adj %q, could be %q", score, lowest)
	}
	// A service manager's stop signal, or a terminal's hangup, must not end it.
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGPIPE, unix.SIGUSR1, unix.SIGXFSZ} {
		if err := conmon.Signal(monitor, sig); err != nil {
			t.Error(err)
		}
	}
	os.Unsetenv("NOTIFY_SOCKET") // crun would use it
	c.start()
	if err := client.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if e := exit(t, client); e.Code != 137 {
		t.Errorf("exit %+v", e)
	}
}

// The runtime gets the environment of the Spec.
func TestRuntimeEnvironment(t *testing.T) {
	t.Parallel()
	c := newContainer(t, "runc")
	c.Env = []string{"CRIUS_TEST=for the runtime", "CRIUS_LARGE=" + strings.Repeat("x", 100_000)}
	c.fake(`[ ${#CRIUS_LARGE} = 100000 ] && [ -n "$PATH" ] && ! env | grep -q ^GOGC=off && echo "it has $CRIUS_TEST" >&2; exit 1`)
	if _, err := c.tryLaunch(t.Context()); err == nil || !strings.Contains(err.Error(), "it has for the runtime") {
		t.Errorf("got %v", err)
	}
	c.checkNothing()
}
