package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/test/kit/tools"
)

// ociRuntime makes the containers for both monitors.
const ociRuntime = "crun"

// A monitor starts the monitoring process of container c, which creates the
// container, and returns its pid.
type monitor struct {
	name  string
	start func(ctx context.Context, l *lab, c *container) (pid int, err error)
}

// peers are the monitors that a row compares, crius first.
var peers = []monitor{
	{"crius-conmon", startCrius},
	{"conmon", startConmon},
}

// lab is the environment of the containers.
type lab struct {
	dir     string // bundles, and related files
	logs    string // where the logs are
	cgroup  string
	program string // crius-conmon
	number  int
}

// newLab requires log directories in memory: the disk is not measured.
func newLab(ctx context.Context) (l *lab, err error) {
	l = &lab{cgroup: fmt.Sprintf("/crius-bench-%d", os.Getpid())}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close(ctx))
		}
	}()
	// Monitors that fork become children of this process, which reaps them.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return l, err
	}
	if l.dir, err = os.MkdirTemp("", "bench"); err != nil { // a socket's path must be short
		return l, err
	}
	l.logs = filepath.Join(l.dir, "logs")
	if err := os.Mkdir(l.logs, 0o755); err != nil {
		return l, err
	}
	if err := unix.Mount("tmpfs", l.logs, "tmpfs", 0, "size=2g"); err != nil {
		return l, fmt.Errorf("mount a tmpfs for the logs: %w", err)
	}
	programs, err := tools.Programs(ctx, false)
	if err != nil {
		return l, err
	}
	l.program = filepath.Join(programs, "crius-conmon")
	return l, l.fillRoot()
}

// fillRoot makes the containers' root file system, which contains this program.
func (l *lab) fillRoot() error {
	for _, name := range []string{"proc", "dev"} {
		if err := os.MkdirAll(filepath.Join(l.root(), name), 0o755); err != nil {
			return err
		}
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(l.root(), "bench"), self, 0o755)
}

func (l *lab) root() string { return filepath.Join(l.dir, "rootfs") }

func (l *lab) close(ctx context.Context) error {
	err := cgroup.Remove(ctx, l.cgroup)
	if l.logs != "" {
		if gone := unix.Unmount(l.logs, unix.MNT_DETACH); gone != unix.EINVAL && gone != unix.ENOENT {
			err = errors.Join(err, gone)
		}
	}
	return errors.Join(err, os.RemoveAll(l.dir))
}

// container is a running container and its monitor.
type container struct {
	lab     *lab
	id, dir string
	log     string
	monitor int // pid
	client  *conmon.Client
}

// run creates and starts a container that runs this program with args.
func (l *lab) run(ctx context.Context, m monitor, args ...string) (*container, error) {
	l.number++
	c := &container{lab: l, id: fmt.Sprintf("crius-bench-%d-%d", os.Getpid(), l.number)}
	c.dir = filepath.Join(l.dir, strconv.Itoa(l.number))
	c.log = filepath.Join(l.logs, c.id)
	err := os.Mkdir(c.dir, 0o755)
	if err == nil {
		err = c.writeBundle(args)
	}
	if err == nil {
		c.monitor, err = m.start(ctx, l, c)
	}
	if err == nil {
		err = c.runtime(ctx, "start", c.id)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", m.name, err), c.remove(ctx))
	}
	return c, nil
}

func (c *container) writeBundle(args []string) error {
	type object = map[string]any
	mount := func(target, kind string) object {
		return object{"destination": target, "type": kind, "source": kind}
	}
	config, err := json.Marshal(object{
		"ociVersion": "1.0.2",
		"process": object{
			"args": append([]string{"/bench"}, args...), "cwd": "/", "noNewPrivileges": true,
			"user": object{"uid": 0, "gid": 0},
		},
		"root":   object{"path": c.lab.root(), "readonly": true},
		"mounts": []object{mount("/proc", "proc"), mount("/dev", "tmpfs")},
		"linux": object{
			"cgroupsPath": c.lab.cgroup + "/" + c.id,
			"namespaces":  []object{{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}},
		},
	})
	if err != nil {
		return err
	}
	return os.WriteFile(c.file("config.json"), config, 0o600)
}

func (c *container) file(name string) string { return filepath.Join(c.dir, name) }

func (c *container) runtime(ctx context.Context, args ...string) error {
	// Not a pipe: processes that the runtime leaves behind would hold it open.
	out, err := os.Create(c.file("runtime.out"))
	if err != nil {
		return err
	}
	defer out.Close()
	cmd := exec.CommandContext(ctx, ociRuntime, append([]string{"--root", c.file("root")}, args...)...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = out, out, time.Second
	if err := cmd.Run(); err != nil {
		said, _ := os.ReadFile(out.Name())
		return fmt.Errorf("%s %s: %w: %s", ociRuntime, args[0], err, said)
	}
	return nil
}

func (c *container) signal(s unix.Signal) error {
	pid, err := readPid(c.file("pid"))
	if err != nil {
		return err
	}
	return unix.Kill(pid, s)
}

// remove ends the container and waits for its monitor.
func (c *container) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	err := cgroup.Kill(ctx, c.lab.cgroup+"/"+c.id)
	if c.client != nil {
		err = errors.Join(err, c.client.Release(ctx), c.client.Close())
	} else if c.monitor > 0 {
		_, waited := unix.Wait4(c.monitor, nil, 0, nil)
		err = errors.Join(err, waited)
	}
	if _, missing := os.Stat(filepath.Join(c.file("root"), c.id)); missing == nil {
		err = errors.Join(err, c.runtime(ctx, "delete", "--force", c.id))
	}
	_ = os.Remove(c.log)
	return errors.Join(err, cgroup.Remove(ctx, c.lab.cgroup+"/"+c.id), os.RemoveAll(c.dir))
}

func startCrius(ctx context.Context, l *lab, c *container) (pid int, err error) {
	c.client, err = conmon.Launch(ctx, conmon.Spec{
		ID: c.id, Monitor: l.program, Dir: c.dir,
		ExitFile: c.file("exit.json"), LogFile: c.log, PidFile: c.file("pid"),
		Runtime: []string{ociRuntime, "--root", c.file("root"), "create", "--bundle", c.dir, "--pid-file", c.file("pid")},
	})
	if err != nil {
		return 0, err
	}
	processes, err := conmon.ReadProcesses(c.dir)
	return processes.Monitor.PID, err
}

// startConmon drives conmon as podman and CRI-O do. It is told not to sync the
// log at the container's end, because crius-conmon does not either: that is not
// measured.
func startConmon(ctx context.Context, _ *lab, c *container) (pid int, err error) {
	path, err := exec.LookPath(ociRuntime)
	if err != nil {
		return 0, err
	}
	result, word, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer result.Close()
	cmd := exec.CommandContext(ctx, "conmon",
		"--cid", c.id, "--name", c.id, "--cuuid", c.id, "--api-version", "1",
		"--runtime", path, "--runtime-arg", "--root="+c.file("root"), "--bundle", c.dir,
		"--container-pidfile", c.file("pid"), "--conmon-pidfile", c.file("conmon.pid"),
		"--log-path", "k8s-file:"+c.log, "--exit-dir", c.dir, "--socket-dir-path", c.dir,
		"--no-sync-log")
	cmd.ExtraFiles = []*os.File{word}
	cmd.Env = append(os.Environ(), "_OCI_SYNCPIPE=3")
	said := new(bytes.Buffer)
	cmd.Stderr = said
	err = cmd.Start()
	word.Close()
	if err != nil {
		return 0, err
	}
	var created struct {
		Data    int
		Message string
	}
	decoded := json.NewDecoder(result).Decode(&created)
	// The awaited process has forked by now; conmon itself is the child that it
	// left.
	if err := errors.Join(cmd.Wait(), decoded); err != nil {
		return 0, fmt.Errorf("%w: %s", err, said)
	}
	if created.Data <= 0 {
		return 0, fmt.Errorf("create: %s", created.Message)
	}
	return readPid(c.file("conmon.pid"))
}

func readPid(file string) (int, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}
