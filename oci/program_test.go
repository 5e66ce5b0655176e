package oci

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

// TestCreateFailed has the messages of runc 1.1.5 and 1.5.2, of crun 1.8.1 and
// of the current one, of containerd's shim for runc, of gVisor 20260527, and of
// Kata 1, by the command line and by its shim.
func TestCreateFailed(t *testing.T) {
	t.Parallel()
	const runc = "runc create failed: unable to start container process: "
	const init = runc + "error during container init: "
	const gvisor = "starting container: starting root container: starting sandbox: creating process: "
	const kata = "rpc error: code = Internal desc = Could not run process: "
	// A whole script in place of a program's name, truncated as the monitor does.
	script := strings.Repeat("/bin/trüe;\n", wire.MaxText/8)
	end := func(message string) string {
		return strings.ToValidUTF8(message[len(message)-wire.MaxText:], "\uFFFD")
	}
	for _, test := range []struct {
		program, cwd, says string
		own                bool
	}{
		{"/nope", "/", runc + `exec: "/nope": stat /nope: no such file or directory`, true},
		{"/nope", "/", init + `exec: "/nope": stat /nope: no such file or directory`, true},
		{"/nope", "/", "OCI runtime create failed: " + init + `exec: "/nope": stat /nope: no such file or directory: unknown`, true},
		{"nope", "/", runc + `exec: "nope": executable file not found in $PATH`, true},
		{"", "/", runc + `exec: "": executable file not found in $PATH`, true},
		{"nope", "/", runc + `exec: "nope": cannot run executable found relative to current directory`, true},
		{"/etc", "/", runc + `exec: "/etc": is a directory`, true},
		{"/plain", "/", runc + `exec: "/plain": permission denied`, true},
		{"/nope", "/", "write logpipe: file already closed\n" + init + `exec: "/nope": stat /nope: no such file or directory`, true},
		{"/file/x", "/", runc + `exec: "/file/x": stat /file/x: not a directory`, true},
		{"/loop", "/", runc + `exec: "/loop": stat /loop: too many levels of symbolic links`, true},
		{"a\nb", "/", runc + `exec: "a\nb": executable file not found in $PATH`, true},
		{"/x", "/file", init + "mkdir /file: not a directory", true},
		{"/x", "/a/b", init + "mkdir /a: read-only file system", true},
		{"/x", "/secret", init + `chdir to cwd ("/secret") set in config.json failed: permission denied`, true},
		{"/nope", "/", "open executable: Operation not permitted", true},
		{"/plain", "/", "open executable: Permission denied", true},
		{"nope", "/", "executable file `nope` not found in $PATH: No such file or directory", true},
		{"/nope", "/", "executable file `/nope` not found: No such file or directory", true},
		{"/nope", "/", "executable file `/nope` not found in $PATH: No such file or directory", true},
		{"", "/", "cannot find `` in $PATH: No such file or directory", true},
		{"/plain", "/", "the path `/plain` exists but it is not executable: Operation not permitted", true},
		{"/etc", "/", "the path `/etc` is not a regular file: Operation not permitted", true},
		{"bin/nope", "/usr", "executable file `/usr/bin/nope` not found: No such file or directory", true},
		{"/file/x", "/", "open `/file/x`: Not a directory", true},
		{"/x", "/file", "chdir `/file`: Not a directory", true},
		{"nope", "/", "OCI runtime create failed: executable file `nope` not found in $PATH: No such file or directory: unknown", true},
		{script, "/", end(runc + "exec: " + strconv.Quote(script) + ": stat " + script + ": file name too long"), true},
		{"/nope", "/", kata + `container_linux.go:348: starting container process caused "exec: \"/nope\": stat /nope: no such file or directory"`, true},
		{"nope", "/", kata + `container_linux.go:349: starting container process caused "exec: \"nope\": executable file not found in $PATH": unknown`, true},
		{"/x", "/file", kata + `container_linux.go:349: starting container process caused "process_linux.go:449: container init caused \"mkdir /file: not a directory\""`, false},
		{"/nope", "/", kata + `container_linux.go:348: starting container process caused "input/output error"`, false},
		{"/nope", "/", gvisor + "failed to load /nope: no such file or directory", true},
		{"bin/nope", "/usr", gvisor + "failed to load /usr/bin/nope: no such file or directory", true},
		{"/text", "/", gvisor + "failed to load /text: exec format error", true},
		{"nope", "/", gvisor + `error finding executable "nope" in PATH [/usr/bin /bin]: no such file or directory`, true},
		{"/x", "/nope", gvisor + `failed to find initial working directory "/nope": no such file or directory`, true},

		{"/nope", "/", runc + `exec: "/nope": stat /nope: input/output error`, false},
		{"/nope", "/", runc + `exec: "/other": stat /other: no such file or directory`, false},
		{"/nope", "/", runc + `exec: "/nope": stat /nope: no such file or directory, and more`, false},
		{"/nope", "/", runc + "unable to apply cgroup configuration: mkdir /sys/fs/cgroup/x: no such file or directory", false},
		{"/nope", "/sys", init + `error mounting "/nope" to rootfs at "/v": mkdir /sys: read-only file system`, false},
		{"/nope", "/", "runc create failed: invalid rootfs: no such file or directory", false},
		{"/nope", "/", `exec: "newuidmap": executable file not found in $PATH`, false},
		{"/nope", "/", "open executable: Input/output error", false},
		{"/nope", "/", "open `/sys/fs/cgroup/x`: No such file or directory", false},
		{"/nope", "/", gvisor + "failed to load /other: no such file or directory", false},
		{"/nope", "/", gvisor + "failed to load /nope: input/output error", false},
		{"/nope", "/a", "chdir `/b`: No such file or directory", false},
		{"a\nb", "/", "executable file `a\nb` not found in $PATH: No such file or directory", true},
		{"/nope", "/", "warning, open executable: Permission denied", false},
		{"/nope", "/", "no such file or directory", false},
		{script, "/", end(runc + "exec: " + strconv.Quote(script) + ": stat " + script + ": input/output error"), false},
		{"/nope", "/", end(script + ": no such file or directory"), false},
		{"/nope", "/", "/nope", false},
		{"/nope", "/", "", false},
	} {
		p := &specs.Process{Args: []string{test.program}, Cwd: test.cwd, Env: []string{"HOME=/", "PATH=/usr/bin:/bin"}}
		err := createFailed(t.Context(), "some", p, "", &conmon.CreateError{ExitCode: 1, Message: test.says})
		var program *ProgramError
		if errors.As(err, &program) != test.own || test.own && !errors.Is(err, fault.Precondition) {
			t.Errorf("%q in %q: %q is taken for %T", test.program, test.cwd, test.says, err)
		}
		if strings.Contains(err.Error(), "\n") || !strings.HasPrefix(err.Error(), "some create (to run ") {
			t.Errorf("%v", err)
		}
	}
	p := &specs.Process{Args: []string{"/nope"}, Cwd: "/"}
	for _, cause := range []error{
		&conmon.CreateError{Message: "open executable: Permission denied"}, // the monitor's own words
		errors.New("open executable: Permission denied"),
		conmon.ErrLost,
	} {
		err := createFailed(t.Context(), "some", p, "", cause)
		if _, ok := errors.AsType[*ProgramError](err); ok || !errors.Is(err, cause) {
			t.Errorf("%v has become %T", cause, err)
		}
	}
}

func TestErrorAlone(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]string{
		"":                        "",
		"runc create failed: x\n": "runc create failed: x",
		"write logpipe: closed\nrunc create failed: x":           "runc create failed: x",
		"write logpipe: closed\nexec failed: x\n\n":              "exec failed: x",
		"unknown syscall ignored\nexecutable file `a` not found": "executable file `a` not found",
	} {
		if got := errorAlone(t.Context(), said); got != want {
			t.Errorf("%q: %q, want %q", said, got, want)
		}
	}
}

func TestCodeOfAProgramThatCannotBeRun(t *testing.T) {
	t.Parallel()
	for message, want := range map[string]int32{
		`runc exec: exit status 255: exec failed: unable to start container process: exec: "nope": executable file not found in $PATH`:                          codeNotFound,
		`runc exec: exit status 255: exec failed: unable to start container process: exec: "/nope": stat /nope: no such file or directory`:                      codeNotFound,
		"crun exec: exit status 1: executable file `/nope` not found: No such file or directory":                                                                codeNotFound,
		`shim exec: OCI runtime exec failed: exec failed: exec: "/nope": stat /nope: no such file or directory: unknown`:                                        codeNotFound,
		`runsc exec: exit status 128: executing processes for container: executing command "/nope" in sandbox: failed to load /nope: no such file or directory`: codeNotFound,
		`runc exec: exit status 255: exec failed: unable to start container process: exec: "/etc/passwd": permission denied`:                                    codeNotExecutable,
		`runc exec: exit status 255: exec failed: unable to start container process: exec: "x": cannot run executable found relative to current directory`:      codeNotExecutable,
		"crun exec: exit status 1: the path `/etc` exists but it is not executable: Permission denied":                                                          codeNotExecutable,
	} {
		r := (&ProgramError{message}).result()
		if r.ExitCode != want || string(r.Stderr) != message+"\n" || len(r.Stdout) != 0 {
			t.Errorf("%s: code %d, stdout %q, stderr %q", message, r.ExitCode, r.Stdout, r.Stderr)
		}
	}
}
