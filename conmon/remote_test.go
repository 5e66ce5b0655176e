package conmon_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/test/kit/wait"
)

// remoteContainer is a container in another container's sandbox, which is a
// process that sleeps. Its runtime is a few scripts, made to fail here; package
// test/runtimes tests real ones.
type remoteContainer struct {
	*testing.T
	conmon.Spec
	sandbox *exec.Cmd
}

// newRemoteContainer has a runtime whose create writes the sandbox's pid, and
// whose start and wait commands are given.
func newRemoteContainer(t *testing.T, start, wait string) *remoteContainer {
	t.Helper()
	dir, err := os.MkdirTemp("", "c")
	if err != nil {
		t.Fatal(err)
	}
	i := &remoteContainer{T: t, sandbox: exec.Command("sleep", "1000")}
	if err := i.sandbox.Start(); err != nil {
		t.Fatal(err)
	}
	file := func(name string) string { return filepath.Join(dir, name) }
	script := func(text string) []string { return []string{"/bin/sh", "-c", "cd " + dir + "\n" + text} }
	i.Spec = conmon.Spec{
		ID: "inmate", Dir: dir, ExitFile: file("exit.json"), LogFile: file("log"), PidFile: file("pid"),
		Monitor: monitorPath, Cgroup: cgroupRoot + "/monitors",
		Runtime: script(fmt.Sprintf("echo %d >pid", i.sandbox.Process.Pid)),
		Start:   script(start), Wait: script(wait), Helpers: true,
	}
	t.Cleanup(func() {
		_ = i.sandbox.Process.Kill()
		_ = i.sandbox.Wait()
		if err := conmon.Terminate(limit(t), dir); err != nil {
			t.Error(err)
		}
		os.RemoveAll(dir)
	})
	return i
}

func (i *remoteContainer) launch() *conmon.Client {
	i.Helper()
	client, err := conmon.Launch(limit(i), i.Spec)
	if err != nil {
		i.Fatal(err)
	}
	i.Cleanup(func() { client.Close() })
	return client
}

func (i *remoteContainer) write(name string) {
	i.Helper()
	if err := os.WriteFile(filepath.Join(i.Dir, name), nil, 0o600); err != nil {
		i.Fatal(err)
	}
}

// wants checks how the container ended, and that the monitor exits.
func (i *remoteContainer) wants(client *conmon.Client, code int32) {
	i.Helper()
	if e := exit(i.T, client); e.Code != code {
		i.Errorf("it ended with %+v, want code %d", e, code)
	}
	if e, err := conmon.ReadExit(i.ExitFile); err != nil || e.Code != code {
		i.Errorf("recorded is %+v, %v", e, err)
	}
	known, err := conmon.ReadProcesses(i.Dir)
	if err != nil {
		i.Fatal(err)
	}
	gone(i.T, known.Monitor)
}

const (
	starts = "echo out; echo err >&2; touch started"
	waits  = `while [ ! -e end ]; do sleep 0.02; done; echo '{"id":"inmate","exitStatus":5}'`
)

// The streams are those of the start command, the end is what the wait command
// prints, and the monitor neither signals nor reaps the sandbox's process.
func TestSandboxedContainer(t *testing.T) {
	t.Parallel()
	i := newRemoteContainer(t, starts, waits)
	client := i.launch()
	if pid := client.PID(); pid != i.sandbox.Process.Pid {
		t.Errorf("its pid is %d", pid)
	}
	if _, err := os.Stat(filepath.Join(i.Dir, "started")); err == nil {
		t.Error("it runs before it is started")
	}
	for range 2 { // a second client, after a restart of the server, gets the same answer
		if err := client.Start(limit(t)); err != nil {
			t.Fatal(err)
		}
	}
	i.write("end")
	i.wants(client, 5)
	if stdout, stderr := joinLogs(t, i.LogFile); stdout != "out\n" || stderr != "err\n" {
		t.Errorf("the log has %q and %q", stdout, stderr)
	}
	if i.sandbox.ProcessState != nil || unix.Kill(i.sandbox.Process.Pid, 0) != nil {
		t.Error("the sandbox is gone")
	}
}

// A wait command that dies is run again.
func TestSandboxedContainerWaitCommandIsRestarted(t *testing.T) {
	t.Parallel()
	i := newRemoteContainer(t, starts, "touch waits\n[ -e third ] || { [ -e second ] && touch third; touch second; kill -9 $$; }\n"+waits)
	client := i.launch()
	if err := client.Start(limit(t)); err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the third command to wait", func() bool { _, err := os.Stat(filepath.Join(i.Dir, "third")); return err == nil })
	i.write("end")
	i.wants(client, 5)
}

// A wait command that cannot be run at first is run again.
func TestSandboxedContainerWhoseWaitCommandCannotBeRun(t *testing.T) {
	t.Parallel()
	i := newRemoteContainer(t, starts, "")
	program := filepath.Join(i.Dir, "wait")
	if err := os.WriteFile(program, []byte("#!/bin/sh\ncd "+i.Dir+"\n"+waits), 0o600); err != nil {
		t.Fatal(err)
	}
	i.Wait = []string{program}
	client := i.launch()
	if err := client.Start(limit(t)); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(program, 0o700); err != nil {
		t.Fatal(err)
	}
	i.write("end")
	i.wants(client, 5)
}

// For a container that is gone, nothing more than that can be reported.
func TestSandboxedContainerWithoutWaitResult(t *testing.T) {
	t.Parallel()
	i := newRemoteContainer(t, starts, "exit 1")
	client := i.launch()
	if err := client.Start(limit(t)); err != nil {
		t.Fatal(err)
	}
	i.wants(client, 137)
}

// The container ends with its sandbox: while it runs, before it was started,
// and also if the wait command does not notice.
func TestSandboxKilled(t *testing.T) {
	t.Parallel()
	for name, wait := range map[string]string{"noticed": `while kill -0 "$(cat pid)"; do sleep 0.02; done; exit 1`, "not noticed": "exec sleep 1000", "not started": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i := newRemoteContainer(t, starts, wait)
			client := i.launch()
			if wait != "" {
				if err := client.Start(limit(t)); err != nil {
					t.Fatal(err)
				}
			}
			if err := i.sandbox.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = i.sandbox.Wait()
			i.wants(client, 137)
		})
	}
}

// A failed start is reported, and leaves a container that can only be deleted.
func TestSandboxedContainerStartFails(t *testing.T) {
	t.Parallel()
	i := newRemoteContainer(t, "exit 9", waits)
	client := i.launch()
	if err := client.Start(limit(t)); err == nil || !strings.Contains(err.Error(), "exit code 9") {
		t.Errorf("start: %v", err)
	}
	if err := client.Release(limit(t)); err != nil {
		t.Fatal(err)
	}
	i.wants(client, 137)
}

// A start does not disconnect clients: later requests of its client are
// answered after it, those of others at once; and a client that leaves does not
// stop it.
func TestSlowStart(t *testing.T) {
	t.Parallel()
	i := newRemoteContainer(t, "while [ ! -e go ]; do sleep 0.02; done\n"+starts, waits)
	client := i.launch()
	started := make(chan error, 1)
	go func() { started <- client.Start(limit(t)) }()
	other, err := conmon.Dial(limit(t), i.Dir, i.ExitFile)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := other.ReopenLog(limit(t)); err != nil {
		t.Errorf("another client: %v", err)
	}
	reopened := make(chan error, 1)
	go func() { reopened <- client.ReopenLog(limit(t)) }()
	select {
	case err := <-started:
		t.Fatalf("started before it was: %v", err)
	case <-reopened: // the request may have come before the start
	default:
	}
	i.write("go")
	if err := <-started; err != nil {
		t.Error(err)
	}
	client.Close()
	i.write("end")
	i.wants(other, 5)
}

// A container that is released during its start is not started any more.
func TestReleasedWhileItStarts(t *testing.T) {
	t.Parallel()
	i := newRemoteContainer(t, "echo $$ >starting; exec sleep 1000", waits)
	client := i.launch()
	go func() { _ = client.Start(limit(t)) }()
	wait.For(t, "the start", func() bool { text, _ := os.ReadFile(filepath.Join(i.Dir, "starting")); return len(text) > 0 })
	if err := conmon.Terminate(limit(t), i.Dir); err != nil {
		t.Fatal(err)
	}
	i.wants(client, 137)
}

// A start holds a lock for as long as it runs, by which another server sees
// that it is under way. While a server holds the lock nothing is started.
func TestSandboxedContainerStartHoldsALock(t *testing.T) {
	t.Parallel()
	i := newRemoteContainer(t, "touch begun; while [ ! -e go ]; do sleep 0.02; done; "+starts, waits)
	client := i.launch()
	lock, err := os.OpenFile(filepath.Join(i.Dir, wire.StartLock), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	take := func() error { return unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
	if err := take(); err != nil {
		t.Fatal(err)
	}
	if err := client.Start(limit(t)); err == nil || !strings.Contains(err.Error(), wire.StartLock) {
		t.Errorf("while a server looks: %v", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	started := make(chan error, 1)
	go func() { started <- client.Start(limit(t)) }()
	wait.For(t, "the start to begin", func() bool { _, err := os.Stat(filepath.Join(i.Dir, "begun")); return err == nil })
	if err := take(); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("the lock of a start under way: %v", err)
	}
	i.write("go")
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the lock to be free", func() bool { return take() == nil })
	i.write("end")
	i.wants(client, 5)
}
