package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/poll"
	"github.com/crius-run/crius/internal/programs"
	"github.com/crius-run/crius/oci/version"
)

// shimmed drives a runtime through a containerd shim. A container's monitor has
// the shim create it, and waits for its end, through a separate program
// (crius-conmon-shim); this package calls the shim for everything else.
type shimmed struct {
	*entry
	server string // of this server, for shims to call
}

// client returns the path of crius-conmon-shim, also beside an error. It is looked for at each
// use: only what needs the program fails while it is missing, and works once it is back.
func (r *shimmed) client() (string, error) {
	const name = "crius-conmon-shim"
	dir := filepath.Dir(r.monitor)
	path, err := programs.Find(name, dir)
	if err != nil {
		return filepath.Join(dir, name), fmt.Errorf("%s not found in the directory of %s or in PATH, or not executable: it is part of crius, reinstall it: %w",
			name, r.monitor, fault.Unavailable)
	}
	return path, nil
}

func (r *shimmed) Probe(ctx context.Context) (*Abilities, error) {
	if _, err := r.client(); err != nil && r.refused == nil {
		return nil, fmt.Errorf("handler %s: %w", r.name, err)
	}
	return r.probe(ctx, r.ask)
}

// ask: for runc's shim, what runc can do matters. gVisor's has a kernel in a
// process, whose limits are those of its cgroup. As far as crius can know, any
// other shim makes virtual machines or something like them. A program that runs
// and refuses -v, which Kata 1's does not have, is one of those.
func (r *shimmed) ask(ctx context.Context, path string) (*Abilities, error) {
	text, err := output(ctx, path, "-v")
	if refused, ran := errors.AsType[*exec.ExitError](err); ran && refused.Exited() {
		text, err = []byte(filepath.Base(path)+" of unknown version"), nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s -v: %w: %w", path, err, fault.Unavailable)
	}
	a := &Abilities{Sandboxed: true, VirtualMachine: !shim.OfRunsc(version.Line(text))}
	switch {
	case ofRunc(version.Line(text)):
		if a, err = r.askRunc(ctx); err != nil {
			return nil, err
		}
	case r.features != nil:
		a.believe(r.features)
	}
	if _, err := shim.Options(!a.Sandboxed, r.options(a, 0, 0)); err != nil {
		return nil, fmt.Errorf("runtime options: %w", err)
	}
	a.Path, a.Version, a.quirks = path, shimVersion(string(text)), quirks{}
	return a, nil
}

func (r *shimmed) askRunc(ctx context.Context) (*Abilities, error) {
	binary := r.option("BinaryName")
	if binary == "" {
		binary = "runc"
	}
	path, err := exec.LookPath(binary)
	if err != nil {
		return nil, &behindError{binary, err}
	}
	a, err := ask(ctx, path, r.features)
	if err != nil {
		return nil, err
	}
	a.Sandboxed, a.behind = false, a.Version
	return a, nil
}

// behindError says that the runtime that a shim runs is missing.
type behindError struct {
	binary string
	cause  error
}

func (e *behindError) Error() string {
	return fmt.Sprintf("the shim needs %s (%s): install it, or add --BinaryName=PATH to the handler's options", e.binary, e.cause)
}

func (e *behindError) Unwrap() []error { return []error{e.cause, fault.Unavailable} }

// ofRunc recognizes runc's shim by the first line of its output, which is the
// name under which it was called.
func ofRunc(line string) bool {
	return strings.HasPrefix(filepath.Base(line), "containerd-shim-runc-v")
}

// shimVersion returns the name of a shim and what it prints after "Version:".
func shimVersion(text string) string {
	name := strings.TrimSuffix(filepath.Base(version.Line([]byte(text))), ":")
	for line := range strings.Lines(text) {
		if _, number, ok := strings.Cut(line, "Version:"); ok {
			return strings.TrimSpace(name + " " + version.Line([]byte(strings.TrimSpace(number))))
		}
	}
	return name
}

// beforeBootstrap reports whether a shim is known to read its options alone from
// standard input: one of containerd's own before version 2.3, which would be
// run twice otherwise, or gVisor's, which ignores what it cannot read.
func beforeBootstrap(called string) bool {
	name, number, _ := strings.Cut(called, " ")
	_, v := version.Parse(name + " version " + number)
	return ofRunc(name) && v != version.Number{} && !v.Has(2, 3) || shim.OfRunsc(name)
}

// option returns the value of one of the handler's options; empty if it is not
// set.
func (r *shimmed) option(key string) string {
	for _, line := range r.handler.Options {
		if name, value, _ := strings.Cut(strings.TrimLeft(line, "-"), "="); strings.EqualFold(name, key) {
			return value
		}
	}
	return ""
}

// options returns the handler's options and, for runc's shim, those that crius
// itself sets, such as the owner of the container's pipes, which that shim
// makes itself.
func (r *shimmed) options(a *Abilities, uid, gid uint32) []string {
	if a.Sandboxed {
		return r.handler.Options
	}
	own := []string{
		"Root=" + r.handler.Root, "SystemdCgroup=" + strconv.FormatBool(r.systemd),
		fmt.Sprintf("IoUid=%d", uid), fmt.Sprintf("IoGid=%d", gid),
	}
	return append(own, r.handler.Options...)
}

func (r *shimmed) Create(ctx context.Context, ref Ref, spec *specs.Spec, io IO) (Task, error) {
	a, err := r.Probe(ctx)
	if err != nil {
		return nil, err
	}
	if shim.OfRunsc(a.Version) && ref.Holder == "" {
		keepInCgroup(spec)
	}
	program, err := r.client()
	if err != nil {
		return nil, err
	}
	uid, gid := ref.owner(spec.Process)
	options := r.options(a, uid, gid)
	client, err := r.create(ctx, "the shim of "+r.name, a, ref, spec, conmon.Spec{
		LogFile:       io.LogFile,
		LogDir:        io.LogDir,
		JournalFields: io.JournalFields,
		Runtime:       r.argv(a, ref, program, "create", io, options),
		Wait:          r.argv(a, ref, program, "wait", io, options),
		Fifos:         true,
		Guest:         a.Sandboxed,
		Stdin:         io.Stdin,
		StdinOnce:     io.StdinOnce && !io.Terminal,
	})
	if err != nil {
		return nil, err
	}
	return r.task(ctx, ref, client)
}

// keepInCgroup keeps gVisor's shim from making the runtime sandbox in the pod's
// cgroup, where its limits would not hold, its usage would be that of nobody and
// nobody would look for its processes: the shim takes for the pod's cgroup what
// begins with "pod", from the end of the path.
func keepInCgroup(spec *specs.Spec) {
	const own = "pod"
	inPod := func(part string) bool { return strings.HasPrefix(part, own) }
	if at := spec.Linux.CgroupsPath; strings.HasPrefix(at, "/") && slices.ContainsFunc(strings.Split(at, "/"), inPod) {
		spec.Linux.CgroupsPath = path.Join(at, own)
	}
}

// argv returns the command line of program, which is crius-conmon-shim, without the container's
// id.
func (r *shimmed) argv(a *Abilities, ref Ref, program, verb string, io IO, options []string) []string {
	argv := []string{program, verb, "--shim=" + a.Path, "--dir=" + ref.Dir, "--address=" + r.server}
	if a.Sandboxed {
		argv = append(argv, "--guest")
	} else {
		argv = append(argv, "--runc")
	}
	if beforeBootstrap(a.Version) {
		argv = append(argv, "--older")
	}
	for _, option := range options {
		argv = append(argv, "--option="+option)
	}
	if io.Stdin {
		argv = append(argv, "--stdin")
	}
	if io.Terminal {
		argv = append(argv, "--terminal")
	}
	if verb == "create" {
		argv = append(argv, "--pid-file="+pidFile(ref))
	}
	return argv
}

func (r *shimmed) task(_ context.Context, ref Ref, client *conmon.Client) (Task, error) {
	record, err := shim.ReadRecord(ref.Dir)
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	t := &shimTask{runtime: r, record: record, watched: watched{ref: ref, client: client}}
	if record.Sandboxed {
		return &sandboxedShimTask{shimTask: t}, nil
	}
	return t, nil
}

func (r *shimmed) Load(ctx context.Context, ref Ref) (Task, error) { return load(ctx, r, ref) }

func (r *shimmed) lost(ref Ref, cause error) *gone {
	g := lost(ref, cause)
	g.kill = func(ctx context.Context) error { return r.forget(ctx, ref) }
	return g
}

func (r *shimmed) Unreachable(ref Ref) Task { return unreachable(r, ref) }

// Delete has the shim end the container.
func (r *shimmed) Delete(ctx context.Context, ref Ref) error {
	if err := remove(ctx, r, ref, false); err != nil || !ref.Last {
		return err
	}
	// Its shim has no container left and was told to exit, which it may do late,
	// or never.
	ending, stop := context.WithTimeout(ctx, lastTime)
	defer stop()
	if !poll.Until(ending, 20*time.Millisecond, func() bool { return len(shim.Workers(ref.Dir)) == 0 }) {
		endWorkers(ctx, ref)
	}
	return nil
}

// forget kills and removes the container: through its shim or, if the shim is
// dead, does not answer or was never reached, through the shim's program and by
// itself.
func (r *shimmed) forget(ctx context.Context, ref Ref) error {
	if !shim.Begun(ref.Dir) { // or deleted, perhaps by another handler that does not know these state files
		return errors.Join(r.endMachine(ctx, shim.Record{}, ref), r.removeState(ref))
	}
	record, err := shim.ReadRecord(ref.Dir)
	if err == nil {
		if err = r.deleteByShim(ctx, record, ref); err == nil {
			return errors.Join(r.endMachine(ctx, record, ref), r.removeState(ref), shim.Forget(ref.Dir))
		}
	}
	if fault.Scarce(err) { // it was not reached, and may be healthy
		return err
	}
	slog.DebugContext(ctx, "container deleted without its shim", "container", ref.ID, "err", err)
	if !errors.Is(err, fault.NotFound) {
		// It hangs, with all of its containers: they end with it.
		_ = conmon.Signal(record.Process, unix.SIGKILL)
	}
	endWorkers(ctx, ref)                                  // that might still be creating the container
	if program := r.program(ctx, record); program != "" { // otherwise all that it could do is to remove its state files
		if err := r.deleteByProgram(ctx, program, ref); err != nil {
			// The program has nothing to clean up that it knows of, or is broken. All
			// of the container's processes are in its cgroup, or work in its
			// directory.
			slog.WarnContext(ctx, "shim did not clean up, cleaning up by force", "container", ref.ID, "err", err)
		}
	}
	endWorkers(ctx, ref)
	if record.Address != "" {
		if err := record.RemoveSocket(ctx); err != nil {
			return err
		}
	}
	return errors.Join(endCgroup(ctx, ref), r.endMachine(ctx, record, ref), r.removeState(ref), shim.Forget(ref.Dir))
}

// endMachine kills the virtual machine that a shim has left after the pod's own
// container was deleted.
func (r *shimmed) endMachine(ctx context.Context, record shim.Record, ref Ref) error {
	if ref.Holder != "" || record.Address != "" && !record.Sandboxed {
		return nil
	}
	return endHelpers(ctx, ref.ID)
}

// endWorkers kills the processes that work in the container's directory,
// including those forked meanwhile. It does not wait long for processes that
// the kernel cannot kill now.
func endWorkers(ctx context.Context, ref Ref) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTime)
	defer cancel()
	poll.Until(ctx, 5*time.Millisecond, func() bool {
		workers := shim.Workers(ref.Dir)
		for _, worker := range workers {
			_ = conmon.Signal(worker, unix.SIGKILL)
		}
		return len(workers) == 0
	})
}

// program returns the shim binary with which the container was made; for a
// container without a record the handler's, because its handler is unknown.
// Empty: there is none.
func (r *shimmed) program(ctx context.Context, record shim.Record) string {
	if programs.Executable(record.Program) {
		return record.Program
	}
	if a, err := r.Probe(ctx); err == nil {
		return a.Path
	}
	return ""
}

// deleteByProgram has the shim's program remove what a dead shim has left.
func (r *shimmed) deleteByProgram(ctx context.Context, program string, ref Ref) error {
	ctx, cancel := context.WithTimeoutCause(ctx, verbTimeout, fmt.Errorf("the shim's delete did not end within %s: %w", verbTimeout, fault.Timeout))
	defer cancel()
	publisher, _ := r.client() // no shim is known to run it when it deletes
	_, err := shim.Program{Path: program, ID: ref.ID, Dir: ref.Dir, Server: r.server, Publisher: publisher}.Delete(ctx)
	return err
}

// deleteByShim asks the shim itself. It deletes a container that has run only
// after its end: Kata deletes a sandbox that still runs without complaint, exits
// when it is told to shut down, and leaves the machine to nobody.
func (r *shimmed) deleteByShim(ctx context.Context, record shim.Record, ref Ref) error {
	answering, cancel := withAnswerTime(ctx)
	defer cancel()
	client, err := record.Dial(answering)
	if err != nil {
		return err
	}
	defer client.Close()
	stop := drainFifos(ref)
	defer stop()
	p := shim.Process{ID: ref.ID}
	err = client.Kill(answering, p, unix.SIGKILL, true) // it may be dead, or never have run
	if err == nil && runs(answering, client, p) {
		ending, cancel := context.WithTimeoutCause(ctx, lastTime, fmt.Errorf("the container did not end within %s of SIGKILL: %w", lastTime, fault.Timeout))
		defer cancel()
		if _, err := client.Wait(ending, p); err != nil && !errors.Is(err, fault.NotFound) {
			return err
		}
	}
	answering, again := withAnswerTime(ctx) // the wait has its own
	defer again()
	return deleteEnded(answering, client, record, p)
}

func withAnswerTime(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, lastTime, fmt.Errorf("the shim does not answer: %w", fault.Timeout))
}

// runs reports whether a process has been started and has not ended. Nothing
// can wait for one that has never been started.
func runs(ctx context.Context, client *shim.Client, p shim.Process) bool {
	state, err := client.State(ctx, p)
	return err == nil && state.Started && !state.Ended
}

// deleteEnded deletes a container and ends the shim if it was the last one. A
// killed process takes a moment to die.
func deleteEnded(ctx context.Context, client *shim.Client, record shim.Record, p shim.Process) error {
	for {
		err := client.Delete(ctx, p)
		if err == nil || errors.Is(err, fault.NotFound) {
			if err := client.Shutdown(ctx, p.ID); err != nil {
				return err
			}
			return awaitEnd(ctx, record)
		}
		if errors.Is(err, shim.ErrGone) {
			return err
		}
		if !poll.Pause(ctx, 20*time.Millisecond) {
			return fmt.Errorf("%w: %w", err, context.Cause(ctx))
		}
	}
}

// awaitEnd waits for a shim to exit after it was told to shut down. The shim obeys only
// if it has no other container; it then stops listening before it exits.
func awaitEnd(ctx context.Context, record shim.Record) error {
	const pause = 5 * time.Millisecond
	moment := 2 * pause
	if record.Leader { // usually the pod's own container, which is the last
		moment = 200 * time.Millisecond
	}
	deaf := func() bool {
		once, done := context.WithTimeout(context.WithoutCancel(ctx), reapTime)
		defer done()
		client, err := record.Dial(once)
		if err == nil {
			client.Close()
		}
		return errors.Is(err, fault.NotFound)
	}
	listening, stop := context.WithTimeout(ctx, moment)
	defer stop()
	if !poll.Until(listening, pause, deaf) {
		return nil
	}
	ended := func() bool { return !conmon.Alive(record.Process) }
	poll.Until(ctx, pause, ended)
	// A shim that no longer listens is of no use, and nothing else would kill it.
	_ = conmon.Signal(record.Process, unix.SIGKILL)
	dying, stop := context.WithTimeout(context.WithoutCancel(ctx), reapTime)
	defer stop()
	poll.Until(dying, pause, ended)
	_, _ = unix.Wait4(record.Process.PID, nil, unix.WNOHANG, nil) // an orphan of the monitor, and so a child
	return record.RemoveSocket(ctx)                               // which some do not do
}

// drainFifos reads what the container has written since its monitor died: a
// shim does not delete a container that still wants to write.
func drainFifos(ref Ref) (stop func()) {
	var open []*os.File
	for _, name := range []string{wire.StdoutFifo, wire.StderrFifo} {
		fd, err := unix.Open(filepath.Join(ref.Dir, name), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			continue
		}
		f := os.NewFile(uintptr(fd), name)
		open = append(open, f)
		go func() { _, _ = io.Copy(io.Discard, f) }()
	}
	return func() {
		for _, f := range open {
			_ = f.Close()
		}
	}
}

// removeState removes the state files of the container if the runtime has left
// them, for example when it was killed in the middle of create.
func (r *shimmed) removeState(ref Ref) error {
	err := mount.RemoveAll(filepath.Join(r.handler.Root, shim.Namespace, ref.ID)) // runc's
	if !shim.OfRunsc(r.handler.Path) {
		return err
	}
	files, readErr := StateFilesIn(runscShimRoot)
	for _, file := range files[ref.ID] {
		if removeErr := os.Remove(file); !errors.Is(removeErr, os.ErrNotExist) {
			err = errors.Join(err, removeErr)
		}
	}
	return errors.Join(err, readErr)
}
