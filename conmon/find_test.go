package conmon_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	testprogram "github.com/crius-run/crius/test/kit/program"
	"github.com/crius-run/crius/test/kit/wait"
)

// poserRole makes this test program imitate everything that a monitor says
// about itself, and its user ids too.
const poserRole = "CONMON_TEST_POSER"

func actAsPoser() {
	must(os.WriteFile("/proc/self/comm", []byte("\nUid:\t0\t0\t0\t0\n"), 0))
	fmt.Println("ready")
	_, _ = os.Stdin.Read(make([]byte, 1)) // until the test ends
}

// A process that claims to be a monitor counts only if root of the node has
// started it outside of a container, whatever has become of its file since.
func TestForgedMonitorProcessesAreIgnored(t *testing.T) {
	t.Parallel()
	const uid = 1001
	mapped := []syscall.SysProcIDMap{{HostID: uid, Size: 1}}
	for name, c := range map[string]struct {
		attr    syscall.SysProcAttr
		mode    os.FileMode
		gone    bool // its file, as after an upgrade
		monitor bool
	}{
		"root":                   {mode: 0o755, monitor: true},
		"root, after an upgrade": {mode: 0o755, gone: true, monitor: true},
		"root in a container":    {mode: 0o755, attr: syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}},
		"root of a user namespace": {mode: 0o755, attr: syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWUSER, UidMappings: mapped, GidMappings: mapped, Credential: &syscall.Credential{},
		}},
		"user":                        {mode: 0o755, attr: syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}},
		"user of a program of root's": {mode: 0o755 | os.ModeSetuid, attr: syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "c")
			must(err)
			t.Cleanup(func() { os.RemoveAll(dir) })
			program := filepath.Join(dir, "crius-conmon")
			self, err := os.ReadFile("/proc/self/exe")
			must(err)
			must(testprogram.Write(program, self))
			must(os.Chmod(program, c.mode))
			must(os.Chmod(dir, 0o755))

			cmd := exec.Command(program, "--id=posed", "--dir="+dir, "--pid-file=/pid", "--exit-file=/exit", "--", "runc")
			cmd.Dir, cmd.Env, cmd.SysProcAttr = "/", append(os.Environ(), poserRole+"=yes"), &c.attr
			stdin, err := cmd.StdinPipe()
			must(err)
			stdout, err := cmd.StdoutPipe()
			must(err)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				stdin.Close()
				cmd.Wait()
			})
			if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
				t.Fatalf("it says %q, %v", line, err)
			}
			if c.gone {
				must(os.Remove(program))
			}
			found, err := conmon.Monitors()
			if err != nil {
				t.Fatal(err)
			}
			mine := func(m conmon.Monitor) bool { return m.PID == cmd.Process.Pid && m.ID == "posed" && m.Dir == dir }
			if believed := slices.ContainsFunc(found, mine); believed != c.monitor {
				t.Errorf("among the monitors: %t, want %t: %+v", believed, c.monitor, found)
			}
		})
	}
}

// A program of another name does not count, even if it was started through a
// link.
func TestMonitorsAreFound(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "crius-conmon")
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(sleep, program); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()

	c := newContainer(t, runtimes[0], "sleep")
	client := c.run()
	want := conmon.Monitor{Process: c.processes().Monitor, ID: c.ID, Dir: c.Dir}
	list := func() []conmon.Monitor {
		found, err := conmon.Monitors()
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	if found := list(); !slices.Contains(found, want) || slices.ContainsFunc(found, func(m conmon.Monitor) bool { return m.PID == cmd.Process.Pid }) {
		t.Errorf("%+v, want %+v among them", found, want)
	}
	if err := client.Kill(); err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the dead monitor to be missing from the list", func() bool { return !slices.Contains(list(), want) })
}
