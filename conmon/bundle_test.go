package conmon_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/test/kit/wait"
)

// runtimes are those against which the tests run.
var runtimes = []string{"runc", "crun"}

// everyRuntime runs a test once with each of them.
func everyRuntime(t *testing.T, test func(t *testing.T, runtime string)) {
	t.Parallel()
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			t.Parallel()
			test(t, runtime)
		})
	}
}

var containers atomic.Int64

// container is a bundle and its runtime.
type container struct {
	testing.TB
	conmon.Spec
	runtime string
	config  map[string]any
	cgroup  string

	orphaned bool // its server was killed: init must reap the monitor
}

// newContainer prepares a container that will run the probe with args.
// Everything that it leaves behind, in the kernel and in the runtime, is
// cleaned up and checked.
func newContainer(t testing.TB, runtime string, args ...string) *container {
	t.Helper()
	dir, err := os.MkdirTemp("", "c") // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	id := fmt.Sprintf("conmon-test-%d-%d", os.Getpid(), containers.Add(1))
	file := func(name string) string { return filepath.Join(dir, name) }
	c := &container{TB: t, runtime: runtime, cgroup: cgroupRoot + "/" + id}
	c.Spec = conmon.Spec{
		ID: id, Dir: dir, ExitFile: file("exit.json"), LogFile: file("log"), PidFile: file("pid"),
		Monitor: monitorPath, Cgroup: cgroupRoot + "/monitors",
		Runtime: []string{runtime, "--root", file("root"), "create", "--bundle", dir, "--pid-file", file("pid")},
		Env:     mountItselfIn(dir),
	}
	c.config = c.ociConfig(append([]string{"/probe"}, args...))
	t.Cleanup(c.destroy)
	return c
}

// mountItselfIn tells crun below 1.9 where to mount itself for a moment; the
// mount stays if crun is killed just then. Package oci does the same.
func mountItselfIn(dir string) []string { return []string{"_LIBCONTAINER_STATEDIR=" + dir} }

func (c *container) ociConfig(args []string) map[string]any {
	mount := func(target, kind string, options ...string) map[string]any {
		return map[string]any{"destination": target, "type": kind, "source": kind, "options": options}
	}
	return map[string]any{
		"ociVersion": "1.0.2",
		"process": map[string]any{
			"args": args, "cwd": "/", "env": []string{"PATH=/"}, "noNewPrivileges": true,
			"user": map[string]any{"uid": 0, "gid": 0},
		},
		"root":   map[string]any{"path": rootfs, "readonly": true},
		"mounts": []any{mount("/proc", "proc"), mount("/dev", "tmpfs"), mount("/dev/pts", "devpts", "newinstance", "ptmxmode=0666")},
		"linux": map[string]any{
			"cgroupsPath": c.cgroup,
			"resources":   map[string]any{},
			"namespaces":  []any{namespace("pid"), namespace("mount"), namespace("ipc"), namespace("uts")},
		},
	}
}

func namespace(kind string) map[string]any { return map[string]any{"type": kind} }

func (c *container) linux() map[string]any      { return c.config["linux"].(map[string]any) }
func (c *container) ociProcess() map[string]any { return c.config["process"].(map[string]any) }

// hostPID gives the container the PID namespace of the host.
func (c *container) hostPID() {
	c.linux()["namespaces"] = []any{namespace("mount"), namespace("ipc"), namespace("uts")}
}

func (c *container) writeConfig() {
	c.Helper()
	text, err := json.Marshal(c.config)
	if err != nil {
		c.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(c.Dir, "config.json"), text, 0o600); err != nil {
		c.Fatal(err)
	}
}

// launch creates the container.
func (c *container) launch() *conmon.Client {
	c.Helper()
	client, err := c.tryLaunch(limit(c.TB))
	if err != nil {
		c.Fatalf("launch: %v", err)
	}
	c.Cleanup(func() { client.Close() })
	return client
}

func (c *container) tryLaunch(ctx context.Context) (*conmon.Client, error) {
	if c.Terminal {
		c.ociProcess()["terminal"] = true
	}
	c.writeConfig()
	return conmon.Launch(ctx, c.Spec)
}

// run creates and starts it.
func (c *container) run() *conmon.Client {
	c.Helper()
	client := c.launch()
	c.start()
	return client
}

func (c *container) start() {
	c.Helper()
	if text, err := c.command("start", c.ID); err != nil {
		c.Fatalf("start: %v: %s", err, text)
	}
}

// command runs a verb of the runtime. Its output goes to a file: processes that
// the runtime leaves behind would hold a pipe open.
func (c *container) command(args ...string) (string, error) {
	c.Helper()
	out, err := os.CreateTemp(c.Dir, "output")
	if err != nil {
		c.Fatal(err)
	}
	defer out.Close()
	cmd := exec.CommandContext(limit(c.TB), c.runtime, append([]string{"--root", filepath.Join(c.Dir, "root")}, args...)...)
	cmd.Env = append(os.Environ(), mountItselfIn(c.Dir)...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = out, out, time.Second
	err = cmd.Run()
	text, _ := os.ReadFile(out.Name())
	return string(text), err
}

// exit waits for the end of the container.
func exit(t *testing.T, client *conmon.Client) conmon.Exit {
	t.Helper()
	wait.For(t, "the container to exit", func() bool {
		select {
		case <-client.Exited():
			return true
		default:
			return false
		}
	})
	e, err := client.Exit()
	if err != nil {
		t.Fatalf("exit: %v", err)
	}
	return e
}

// log returns what the container has written, by stream, and checks the file's
// format.
func (c *container) log() (stdout, stderr string) {
	c.Helper()
	return joinLogs(c.TB, c.LogFile)
}

// awaitLog waits until stdout contains text.
func (c *container) awaitLog(text string) {
	c.Helper()
	var stdout string
	wait.For(c.TB, fmt.Sprintf("%q in the log", text), func() bool {
		stdout, _ = c.log()
		return strings.Contains(stdout, text)
	})
}

func (c *container) destroy() {
	ctx, cancel := context.WithTimeout(context.Background(), wait.Limit)
	defer cancel()
	processes, _ := conmon.ReadProcesses(c.Dir)
	if err := conmon.Terminate(ctx, c.Dir); err != nil {
		c.Errorf("terminate: %v", err)
	}
	if err := cgroup.Kill(ctx, c.cgroup); err != nil {
		c.Errorf("kill cgroup: %v", err)
	}
	if _, err := os.Stat(filepath.Join(c.Dir, "root", c.ID)); err == nil {
		if text, err := c.command("delete", "--force", c.ID); err != nil {
			c.Errorf("delete: %v: %s", err, text)
		}
	}
	if err := cgroup.Remove(context.Background(), c.cgroup); err != nil {
		c.Errorf("remove cgroup: %v", err)
	}
	for name, p := range map[string]conmon.Process{"monitor": processes.Monitor, "container": processes.Container} {
		if conmon.Alive(p) {
			c.Errorf("%s %d is still alive", name, p.PID)
		}
	}
	if now, err := wire.Find(processes.Monitor.PID); err == nil && now == processes.Monitor && !c.orphaned {
		c.Errorf("monitor %d has not been reaped", now.PID)
	}
	if err := mount.RemoveAll(c.Dir); err != nil {
		c.Errorf("remove directory: %v", err)
	}
}

// limit returns a context for a request that is expected to be answered.
func limit(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), wait.Limit)
	t.Cleanup(cancel)
	return ctx
}

// gone waits for the end of a process that is not a child of this one.
func gone(t *testing.T, p conmon.Process) {
	t.Helper()
	wait.For(t, fmt.Sprintf("the end of process %d", p.PID), func() bool { return !conmon.Alive(p) })
}

// processes returns the processes that the monitor has recorded.
func (c *container) processes() conmon.Processes {
	c.Helper()
	p, err := conmon.ReadProcesses(c.Dir)
	if err != nil {
		c.Fatal(err)
	}
	return p
}

// refuses reports whether the socket has no listener any more.
func (c *container) refuses() bool {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
	if err != nil {
		c.Fatal(err)
	}
	defer unix.Close(fd)
	return errors.Is(unix.Connect(fd, &unix.SockaddrUnix{Name: c.Dir + "/monitor.sock"}), unix.ECONNREFUSED)
}
