package oci

import (
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/wait"
)

func TestCodeOfAProgramThatCannotBeRun(t *testing.T) {
	t.Parallel()
	for message, want := range map[string]int32{
		`runc exec: exit status 255: exec failed: unable to start container process: exec: "nope": executable file not found in $PATH`:                          codeNotFound,
		`runc exec: exit status 255: exec failed: unable to start container process: exec: "/nope": stat /nope: no such file or directory`:                      codeNotFound,
		"crun exec: exit status 1: executable file `/nope` not found: No such file or directory":                                                                codeNotFound,
		`shim exec: OCI runtime exec failed: exec failed: exec: "/nope": stat /nope: no such file or directory: unknown`:                                        codeNotFound,
		`runsc exec: exit status 128: executing processes for container: executing command "/nope" in sandbox: failed to load /nope: no such file or directory`: codeNotFound,
		`runc exec: exit status 255: exec failed: unable to start container process: exec: "/etc/passwd": permission denied`:                                    codeNotExecutable,
		"crun exec: exit status 1: the path `/etc` exists but it is not executable: Permission denied":                                                          codeNotExecutable,
	} {
		r := (&ProgramError{message}).result()
		if r.ExitCode != want || string(r.Stderr) != message+"\n" || len(r.Stdout) != 0 {
			t.Errorf("%s: code %d, stdout %q, stderr %q", message, r.ExitCode, r.Stdout, r.Stderr)
		}
	}
}

func TestExiting(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("sleep", "1h")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	if exiting(pid) {
		t.Error("a process that sleeps is exiting")
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the process to exit", func() bool { return exiting(pid) }) // a zombie
	_ = cmd.Wait()
	if !exiting(pid) {
		t.Error("a process that is gone is not exiting")
	}
}
