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
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/oci/proc"
)

// ProgramError means that a container cannot be created, or a command cannot be
// run in it, because the program cannot be executed or the working directory
// cannot be entered. That is the container's fault, not the node's, and lasts
// as long as its image. It is fault.Precondition.
type ProgramError struct{ Message string }

func (e *ProgramError) Error() string { return e.Message }
func (e *ProgramError) Unwrap() error { return fault.Precondition }

// notFound reports whether there is no such program.
func (e *ProgramError) notFound() bool {
	message := strings.ToLower(unquoted(strings.TrimSuffix(e.Message, ": unknown")))
	return strings.HasSuffix(message, "not found in $path") || strings.HasSuffix(message, unix.ENOENT.Error())
}

// createFailed returns the error for a failed create by the runtime of that
// name, reduced to the error in its output: a ProgramError if that blames the
// program of p. The container was to have that cgroup.
func createFailed(ctx context.Context, name string, p *specs.Process, cgroupPath string, err error) error {
	failed, ok := errors.AsType[*conmon.CreateError](err)
	if !ok || failed.ExitCode == 0 {
		return fmt.Errorf("%s create (to run %.200q): %w", name, p.Args[0], err)
	}
	text := fmt.Sprintf("%s create (to run %.200q): %s", name, p.Args[0], errorAlone(ctx, failed.Message))
	if blamesProgram(failed.Message, p) {
		return &ProgramError{text}
	}
	return crowded(cgroupPath, errors.New(text))
}

// startFailed does the same for a start.
func startFailed(bundle string, err error) error {
	p, unread := readProcess[specs.Process](bundle)
	if unread == nil && len(p.Args) > 0 && blamesProgram(err.Error(), p) {
		return &ProgramError{err.Error()}
	}
	return err
}

// programErrnos are errnos that an image or a request can cause. Any other,
// such as EIO, is the node's fault.
var programErrnos = []unix.Errno{
	unix.ENOENT, unix.EACCES, unix.EPERM, unix.ENOEXEC, unix.ENOTDIR, unix.EISDIR, unix.ELOOP, unix.ENAMETOOLONG, unix.EROFS,
}

// blamesProgram decides by the runtime's message, because its exit code is the
// same for every failure. The message must name the program or the directory,
// and only an errno that the container can cause may follow.
func blamesProgram(message string, p *specs.Process) bool {
	message = unquoted(strings.TrimSuffix(message, ": unknown")) // the code that containerd's shims append
	end := strings.TrimLeft(message, "\uFFFD")                   // the end of a long name, which may begin within a character
	says := func(words string) bool {
		before, ok := strings.CutSuffix(message, words)
		return ok && (before == "" || strings.HasSuffix(before, ": ") || strings.HasSuffix(before, "\n")) ||
			len(message) >= wire.MaxText-len(": unknown") && strings.HasSuffix(words, end)
	}
	quoted := "exec: " + strconv.Quote(p.Args[0]) + ": "
	return says(quoted+"executable file not found in $PATH") ||
		says(quoted+"cannot run executable found relative to current directory") || // by a relative directory in PATH
		slices.ContainsFunc(programErrnos, func(errno unix.Errno) bool {
			byRunc := errno.Error()
			byCrun := strings.ToUpper(byRunc[:1]) + byRunc[1:]
			return slices.ContainsFunc(wordsOfRunc(p), func(words string) bool { return says(words + byRunc) }) ||
				slices.ContainsFunc(wordsOfGVisor(p), func(words string) bool { return says(words + byRunc) }) ||
				slices.ContainsFunc(wordsOfCrun(p), func(words string) bool { return says(words + byCrun) })
		})
}

// unquoted returns the innermost error of a message. runc before 1.0, which is
// in the guests of Kata 1, quotes the cause of each error.
func unquoted(message string) string {
	for {
		_, cause, found := strings.Cut(message, " caused \"")
		inner, err := strconv.Unquote("\"" + cause)
		if !found || err != nil {
			return message
		}
		message = inner
	}
}

// wordsOfRunc returns what runc prints before the errno: os/exec names a
// program. runc makes a missing working directory.
func wordsOfRunc(p *specs.Process) []string {
	quoted := "exec: " + strconv.Quote(p.Args[0]) + ": "
	words := []string{quoted, quoted + "stat " + p.Args[0] + ": ", "chdir to cwd (" + strconv.Quote(p.Cwd) + ") set in config.json failed: "}
	for dir := path.Clean(p.Cwd); path.Dir(dir) != dir; dir = path.Dir(dir) {
		words = append(words, "error during container init: mkdir "+dir+": ")
	}
	return words
}

// wordsOfGVisor returns what runsc prints: it loads the program when the
// container is started, not before.
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

// wordsOfCrun returns what crun prints: versions before 1.9 do not name a
// program that has a path.
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

// tasksOfRuntime is more than a runtime needs in the container's cgroup, in processes and
// threads, before it becomes the program.
const tasksOfRuntime = 16

// crowded returns the error of a runtime with the likely cause, and as fault.Exhausted, if
// the container or its pod has nearly all the processes that it may have. What a runtime
// says of that is "connection reset by peer", or EOF. Otherwise it may be crius's own cgroup, or the node.
func crowded(cgroupPath string, err error) error {
	at, tasks, most := cgroup.Crowded(cgroupPath, tasksOfRuntime)
	if at == "" {
		return inherit.ExplainOutput(err, err.Error())
	}
	return fmt.Errorf("%s: the cgroup %s has %d of at most %d processes and threads (pids.max), and a runtime needs several: %w",
		fault.Text(err), at, tasks, most, fault.Exhausted)
}

// execFailed classifies the failure of a runtime to start process p: a
// ProgramError if the runtime blames its program, fault.Precondition if the
// container is ending, fault.Exhausted if it has no room for more processes. said
// is the runtime's output, err the error that contains it.
func (t *watched) execFailed(ctx context.Context, p *specs.Process, said string, err error) error {
	switch {
	case ctx.Err() != nil:
		return err
	case blamesProgram(said, p):
		return &ProgramError{err.Error()}
	case t.ending(ctx):
		return fmt.Errorf("the container ended before the command ran (%s): %w", fault.Text(err), fault.Precondition)
	}
	return crowded(t.ref.Cgroup, err)
}

// paused returns why no command can be started in a container whose cgroup somebody has
// frozen: a runtime refuses with advice that no caller of CRI can follow or, if it is the
// pod's cgroup, waits without a word. crius itself freezes for a moment what it kills.
func (t *watched) paused(ctx context.Context) error {
	if file, _ := cgroup.Paused(t.ref.Cgroup); file == "" {
		return nil
	}
	if t.ending(ctx) {
		return fmt.Errorf("the container is ending: %w", fault.Precondition)
	}
	file, thawed := cgroup.Paused(t.ref.Cgroup)
	if file == "" {
		return nil
	}
	return fmt.Errorf("the container is paused: its cgroup is frozen, not by crius: thaw it (echo %s > %s): %w", thawed, file, fault.Unavailable)
}

// result returns the result of an ExecSync whose program cannot be run: the
// exit code and the message of a shell. The kubelet ignores the result of a
// probe if ExecSync returns an error, so a liveness probe without its program
// would never restart the container (kubernetes#106682).
func (e *ProgramError) result() *ExecResult {
	code := int32(codeNotExecutable)
	if e.notFound() {
		code = codeNotFound
	}
	return &ExecResult{Stderr: []byte(e.Message + "\n"), ExitCode: code}
}

// endTime is how long to wait for the end of a container when a command cannot
// be started in it.
const endTime = time.Second

// ending reports whether the container is about to end: then the runtime's
// errors are about namespaces and cgroups that are being torn down. A second is
// long for the monitor to report the exit, but the kernel may take longer over
// large processes.
func (t *watched) ending(ctx context.Context) bool {
	select {
	case <-t.Exited():
		return true
	case <-ctx.Done():
	case <-time.After(endTime):
	}
	return t.ref.Holder == "" && proc.Exiting(t.PID())
}
