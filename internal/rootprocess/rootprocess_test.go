package rootprocess

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// Neither a process's name for itself, nor a user's process, nor a process in a
// container counts.
func TestProgram(t *testing.T) {
	t.Parallel()
	start := func(path string, change func(*exec.Cmd)) int {
		t.Helper()
		cmd := exec.Command(path, "1000")
		if change != nil {
			change(cmd)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		return cmd.Process.Pid
	}
	dir := t.TempDir()
	conmon, sleep := filepath.Join(dir, "conmon"), "/usr/bin/sleep"
	text, err := os.ReadFile(sleep)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(conmon, text, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, parent := range []string{dir, filepath.Dir(dir)} { // for the user
		if err := os.Chmod(parent, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	roots := start(conmon, nil)
	for what, c := range map[string]struct {
		pid  int
		want string
	}{
		"root's":           {roots, "conmon"},
		"its name is lent": {start(sleep, func(cmd *exec.Cmd) { cmd.Args[0] = "conmon" }), "sleep"},
		"a user's": {start(conmon, func(cmd *exec.Cmd) {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1, Gid: 1}}
		}), ""},
		"a container's": {start(conmon, func(cmd *exec.Cmd) {
			cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		}), ""},
		"none": {1 << 30, ""},
	} {
		if got := Program(c.pid); got != c.want {
			t.Errorf("%s: %q, want %q", what, got, c.want)
		}
	}
	if err := os.Remove(conmon); err != nil {
		t.Fatal(err)
	}
	if got := Program(roots); got != "conmon" {
		t.Errorf("after an upgrade: %q", got)
	}
}
