package oci

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/proc"
)

// ProgramError is a container that cannot be created, or a command that cannot be run
// in it, because the program cannot be executed, or the working directory not be
// entered: the container's fault, not the node's, and as lasting as its image. It is
// fault.Precondition.
type ProgramError struct{ Message string }

func (e *ProgramError) Error() string { return e.Message }
func (e *ProgramError) Unwrap() error { return fault.Precondition }

// notFound reports whether there is no such program.
func (e *ProgramError) notFound() bool {
	message := strings.ToLower(strings.TrimSuffix(e.Message, ": unknown"))
	return strings.HasSuffix(message, "not found in $path") || strings.HasSuffix(message, unix.ENOENT.Error())
}

// createFailed is the failure of a create by the runtime of that name, with the
// error alone of what it said: a ProgramError if that blames the program of p.
func createFailed(ctx context.Context, name string, p *specs.Process, err error) error {
	failed, ok := errors.AsType[*conmon.CreateError](err)
	if !ok || failed.ExitCode == 0 {
		return fmt.Errorf("%s create (to run %.200q): %w", name, p.Args[0], err)
	}
	text := fmt.Sprintf("%s create (to run %.200q): %s", name, p.Args[0], errorAlone(ctx, failed.Message))
	if blamesProgram(failed.Message, p) {
		return &ProgramError{text}
	}
	return errors.New(text)
}

// startFailed is the same for a start.
func startFailed(bundle string, err error) error {
	p, unread := readProcess[specs.Process](bundle)
	if unread == nil && blamesProgram(err.Error(), p) {
		return &ProgramError{err.Error()}
	}
	return err
}

// programErrnos are what an image or a request can bring about. Any other errno,
// EIO for one, is the node's.
var programErrnos = []unix.Errno{
	unix.ENOENT, unix.EACCES, unix.EPERM, unix.ENOEXEC, unix.ENOTDIR, unix.EISDIR, unix.ELOOP, unix.ENAMETOOLONG, unix.EROFS,
}

// blamesProgram decides by the runtime's words, since its exit code is the same for
// whatever went wrong. They must name the program or the directory, and an errno of
// the container's making must be all that follows.
func blamesProgram(message string, p *specs.Process) bool {
	message = strings.TrimSuffix(message, ": unknown") // the code, as a shim of containerd's appends it
	end := strings.TrimLeft(message, "\uFFFD")         // of a long one, which may begin within a character
	says := func(words string) bool {
		before, ok := strings.CutSuffix(message, words)
		return ok && (before == "" || strings.HasSuffix(before, ": ") || strings.HasSuffix(before, "\n")) ||
			len(message) >= wire.MaxText-len(": unknown") && strings.HasSuffix(words, end)
	}
	quoted := "exec: " + strconv.Quote(p.Args[0]) + ": "
	return says(quoted+"executable file not found in $PATH") ||
		slices.ContainsFunc(programErrnos, func(errno unix.Errno) bool {
			byRunc := errno.Error()
			byCrun := strings.ToUpper(byRunc[:1]) + byRunc[1:]
			return slices.ContainsFunc(wordsOfRunc(p), func(words string) bool { return says(words + byRunc) }) ||
				slices.ContainsFunc(wordsOfGVisor(p), func(words string) bool { return says(words + byRunc) }) ||
				slices.ContainsFunc(wordsOfCrun(p), func(words string) bool { return says(words + byCrun) })
		})
}

// wordsOfRunc are what runc says before the errno: os/exec speaks of a program. A
// working directory that is missing is made.
func wordsOfRunc(p *specs.Process) []string {
	quoted := "exec: " + strconv.Quote(p.Args[0]) + ": "
	words := []string{quoted, quoted + "stat " + p.Args[0] + ": ", "chdir to cwd (" + strconv.Quote(p.Cwd) + ") set in config.json failed: "}
	for dir := path.Clean(p.Cwd); path.Dir(dir) != dir; dir = path.Dir(dir) {
		words = append(words, "error during container init: mkdir "+dir+": ")
	}
	return words
}

// wordsOfGVisor: it loads the program when the container is started, not before.
func wordsOfGVisor(p *specs.Process) []string {
	program := p.Args[0]
	if strings.Contains(program, "/") && !path.IsAbs(program) {
		program = path.Join(p.Cwd, program)
	}
	var dirs []string
	if i := slices.IndexFunc(p.Env, func(e string) bool { return strings.HasPrefix(e, "PATH=") }); i >= 0 {
		dirs = strings.Split(strings.TrimPrefix(p.Env[i], "PATH="), ":")
	}
	return []string{
		"failed to load " + program + ": ",
		fmt.Sprintf("error finding executable %q in PATH %v: ", program, dirs),
		fmt.Sprintf("failed to find initial working directory %q: ", p.Cwd),
	}
}

// wordsOfCrun: versions before 1.9 do not name a program that has a path.
func wordsOfCrun(p *specs.Process) []string {
	program := p.Args[0]
	words := []string{
		"open executable: ", "chdir `" + p.Cwd + "`: ",
		"executable file `" + program + "` not found in $PATH: ", "cannot find `" + program + "` in $PATH: ",
	}
	if strings.Contains(program, "/") && !path.IsAbs(program) {
		program = path.Join(p.Cwd, program)
	}
	return append(words,
		"executable file `"+program+"` not found: ", "the path `"+program+"` exists but it is not executable: ",
		"the path `"+program+"` is not a regular file: ", "open `"+program+"`: ")
}

// Exit codes that shells give for a command that they cannot run.
const (
	codeNotExecutable = 126
	codeNotFound      = 127
)

// execFailed classifies the failure of a runtime to start process p: a ProgramError
// if the runtime blames its program, fault.Precondition if the container is ending.
// said is what the runtime has said about it, err the error with that in it.
func (t *watched) execFailed(ctx context.Context, p *specs.Process, said string, err error) error {
	switch {
	case ctx.Err() != nil:
		return err
	case blamesProgram(said, p):
		return &ProgramError{err.Error()}
	case t.ending(ctx):
		return fmt.Errorf("the container ended before the command ran (%s): %w", err.Error(), fault.Precondition)
	}
	return err
}

// result is what becomes of an ExecSync whose program cannot be run: the exit code and
// the message that a shell would give. A kubelet ignores the result of a probe if
// ExecSync returns an error, so that a liveness probe without its program would never
// restart the container (kubernetes#106682).
func (e *ProgramError) result() *ExecResult {
	code := int32(codeNotExecutable)
	if e.notFound() {
		code = codeNotFound
	}
	return &ExecResult{Stderr: []byte(e.Message + "\n"), ExitCode: code}
}

// endTime is how long the end of a container is waited for when a command cannot be
// started in it.
const endTime = time.Second

// ending reports whether the container is about to end: then errors of the runtime
// are about namespaces and cgroups that are being taken down. A second is long for
// the monitor to report the exit, but the kernel may take longer over large processes.
func (t *watched) ending(ctx context.Context) bool {
	select {
	case <-t.Exited():
		return true
	case <-ctx.Done():
	case <-time.After(endTime):
	}
	return t.ref.Sandbox == "" && proc.Exiting(t.PID())
}
