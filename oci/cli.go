package oci

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/flock"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/limits"
	"github.com/crius-run/crius/oci/proc"
	"github.com/crius-run/crius/oci/stdio"
)

// cli drives a runtime by the OCI command line: runc, crun and every other
// runtime that understands create, start, kill, delete, exec, update and state.
// Their differences are in their quirks.
type cli struct{ *entry }

// verbTimeout bounds the runtime's quick verbs. They take tens of
// milliseconds; a minute means that the machine or the runtime is stuck.
const verbTimeout = time.Minute

func (r *cli) Probe(ctx context.Context) (*Abilities, error) {
	return r.probe(ctx, func(ctx context.Context, path string) (*Abilities, error) { return ask(ctx, path, r.features) })
}

// argv returns a complete command line of the runtime.
func (r *cli) argv(a *Abilities, args ...string) []string {
	argv := []string{a.Path, "--root", r.handler.Root}
	if flag := a.quirks.systemd; r.systemd && flag != "" {
		argv = append(argv, flag)
	}
	argv = append(argv, r.handler.Options...)
	return append(argv, args...)
}

// run executes one quick verb of the runtime on a container, and appends the
// container's id.
func (r *cli) run(ctx context.Context, ref Ref, stdin []byte, args ...string) ([]byte, error) {
	return r.runWith(ctx, ref, command{stdin: stdin}, args...)
}

func (r *cli) runWith(ctx context.Context, ref Ref, c command, args ...string) ([]byte, error) {
	a, err := r.Probe(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, verbTimeout)
	defer cancel()
	if !slices.Contains(args, ref.ID) { // some verbs have arguments after the id
		args = append(args, ref.ID)
	}
	defer trace.For(ctx, "runtime "+r.name)()
	c.argv, c.env = r.argv(a, args...), mountItselfIn(ref.Dir)
	out, err := c.run(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", r.name, verbOf(args), err)
	}
	return out, nil
}

// verbOf returns the first argument that is not a flag.
func verbOf(args []string) string {
	for _, arg := range args {
		if !strings.HasPrefix(arg, "-") {
			return arg
		}
	}
	return ""
}

func pidFile(ref Ref) string { return filepath.Join(ref.Dir, "pid") }

func (r *cli) Create(ctx context.Context, ref Ref, spec *specs.Spec, io IO) (Task, error) {
	a, err := r.Probe(ctx)
	if err != nil {
		return nil, err
	}
	client, err := r.create(ctx, "runtime "+r.name, a, ref, spec, r.monitored(a, ref, monitorSpec(ref, spec, io, r.argv(a, r.createArgs(a, ref, spec)...))))
	r.relayLog(ctx, ref.ID, runtimeLog(ref))
	if err != nil {
		return nil, err
	}
	if a.quirks.machine {
		if err := noteMachine(ref); err != nil {
			slog.WarnContext(ctx, "cannot find the virtual machine of a container, its death will not be noticed", "container", ref.ID, "err", err)
		}
	}
	return r.task(ctx, ref, client)
}

// monitorSpec returns the settings of the monitor of a container that argv makes.
func monitorSpec(ref Ref, spec *specs.Spec, io IO, argv []string) conmon.Spec {
	uid, gid := ref.owner(spec.Process)
	return conmon.Spec{
		OwnerUID:      uid,
		OwnerGID:      gid,
		LogFile:       io.LogFile,
		LogDir:        io.LogDir,
		JournalFields: io.JournalFields,
		Runtime:       argv,
		Env:           mountItselfIn(ref.Dir),
		Terminal:      io.Terminal,
		Stdin:         io.Stdin,
		StdinOnce:     io.StdinOnce,
	}
}

func (r *cli) createArgs(a *Abilities, ref Ref, spec *specs.Spec) []string {
	args := []string{"create", "--bundle", ref.Dir, "--pid-file", pidFile(ref)}
	if len(a.quirks.hostNetwork) > 0 && onHostNetwork(spec.Linux.Namespaces) {
		args = append(slices.Clone(a.quirks.hostNetwork), args...)
	}
	return r.logged(a, runtimeLog(ref), args)
}

func (r *cli) task(ctx context.Context, ref Ref, client *conmon.Client) (Task, error) {
	t := &cliTask{runtime: r, watched: watched{ref: ref, client: client}, commands: newGate()}
	t.watchMachine(ctx)
	if ref.Holder != "" {
		return &sandboxedTask{cliTask: t}, nil
	}
	return t, nil
}

func (r *cli) Load(ctx context.Context, ref Ref) (Task, error) { return load(ctx, r, ref) }

// Delete kills all processes in the cgroup before it runs the runtime's delete:
// the runtime then has nothing to kill, which makes its delete quick and free
// of races.
func (r *cli) Delete(ctx context.Context, ref Ref) error { return remove(ctx, r, ref, true) }

// forget has the runtime delete the container, and removes what is left of it
// in the runtime's state files: a directory of its name, or some files. Not
// every runtime has these where they are expected: one that may have none is
// asked whether it knows the container.
func (r *cli) forget(ctx context.Context, ref Ref) error {
	a, unusable := r.Probe(ctx)
	patterns := append([]string{"ID*"}, runscStateFiles...) // any kind of container
	if unusable == nil {
		patterns = a.quirks.stateFiles
	}
	stateFiles, err := r.stateFilesOf(ref.ID, patterns)
	if err != nil {
		return err
	}
	// A runtime that has been uninstalled must not keep its pods for ever: all
	// that it could still do is remove its state files.
	if unusable == nil {
		known, err := len(stateFiles) > 0, error(nil)
		if !known && !r.allInRoot(a) {
			known, err = r.knows(ctx, ref)
		}
		if err == nil && known {
			err = r.forgetKnown(ctx, a, ref)
		}
		if err != nil {
			return err
		}
	}
	if ref.Holder == "" && (unusable != nil || a.Sandboxed) {
		if err := endHelpers(ctx, ref.ID); err != nil {
			return err
		}
	}
	// A runtime killed in the middle of create leaves state files that it does
	// not always recognize as a container. Kata mounts the volumes of a pod there.
	for _, path := range stateFiles {
		err = errors.Join(err, mount.RemoveTree(path))
	}
	return err
}

// knows asks the runtime whether it has the container. A refusal means that it
// has not.
func (r *cli) knows(ctx context.Context, ref Ref) (bool, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, lastTime, fmt.Errorf("%s did not answer within %s: %w", r.name, lastTime, fault.Timeout))
	defer cancel()
	_, err := r.run(ctx, ref, nil, "state")
	if _, refused := errors.AsType[*exec.ExitError](err); refused {
		return false, nil
	}
	return err == nil, err
}

// forgetKnown has the runtime delete a container that it knows.
func (r *cli) forgetKnown(ctx context.Context, a *Abilities, ref Ref) error {
	reap := proc.ReapHelpers(a.quirks.helper, cmp.Or(ref.Holder, ref.ID), ref.ID)
	reaped := make(chan struct{})
	go func() { reap(); close(reaped) }() // delete waits for it
	_, err := r.run(ctx, ref, nil, "delete", "--force")
	if _, refused := errors.AsType[*exec.ExitError](err); refused { // the runtime ran and did not hang
		err = r.forgetEnded(ctx, ref, err)
	}
	<-reaped
	return err
}

// forgetEnded has the runtime delete a container without force after a forced
// delete failed, provided that the container has ended. crun would kill it
// first: pidfd_open(2) refuses a pid that is now a thread's, with ENOENT on
// current kernels, and crun does not conclude that the process is gone. Its
// plain delete compares the start time of the process, and refuses a running
// container.
func (r *cli) forgetEnded(ctx context.Context, ref Ref, forced error) error {
	if _, err := r.run(ctx, ref, nil, "delete"); err != nil {
		return forced
	}
	return nil
}

// watched is a container with a monitor, whatever drives its runtime.
type watched struct {
	ref     Ref
	client  *conmon.Client
	closing sync.Once
}

func (t *watched) PID() int { return t.client.PID() }
func (t *watched) PIDNamespace() (*os.File, error) {
	return conmon.OpenPIDNamespace(t.client.Process())
}
func (t *watched) Exited() <-chan struct{}                          { return t.client.Exited() }
func (t *watched) Exit() (conmon.Exit, error)                       { return t.client.Exit() }
func (t *watched) Logged(ctx context.Context) conmon.LogCount       { return t.client.Logged(ctx) }
func (t *watched) ReopenLog(ctx context.Context) error              { return t.client.ReopenLog(ctx) }
func (t *watched) LogTrouble() (conmon.LogTrouble, <-chan struct{}) { return t.client.LogTrouble() }
func (t *watched) Close()                                           { t.closing.Do(func() { _ = t.client.Close() }) }

// attach joins the container's streams at its monitor. The monitor of a shim
// has no terminal, so resize sets the size of the terminal that the container's
// process may have.
func (t *watched) attach(ctx context.Context, wanted conmon.Streams, resize func(context.Context, stdio.Size) error) (*stdio.Session, error) {
	process, err := readProcess[struct{ Terminal bool }](t.ref.Dir)
	if err != nil {
		return nil, err
	}
	if !process.Terminal {
		resize = nil
	}
	a, err := conmon.Attach(ctx, t.ref.Dir, wanted)
	if err != nil {
		return nil, err
	}
	return stdio.New(stdio.Ends{
		Stdin: a.Stdin, Stdout: a.Stdout, Stderr: a.Stderr, Terminal: process.Terminal,
		Ended: t.client.Exited(), Attachment: a, Resize: resize,
	}), nil
}

// dead reports whether the container's end is known.
func (t *watched) dead() bool {
	if !closed(t.client.Exited()) {
		return false
	}
	_, err := t.client.Exit()
	return err == nil
}

// cliTask is a container of a command-line runtime.
type cliTask struct {
	watched
	runtime  *cli
	commands gate

	machineDead chan struct{}      // closed once the container's virtual machine has died; nil: it is not watched
	unwatch     context.CancelFunc // ends that; nil as well
}

func (t *cliTask) Close() {
	if t.unwatch != nil {
		t.unwatch()
	}
	t.watched.Close()
}

func (t *cliTask) resize(ctx context.Context, size stdio.Size) error {
	return t.client.Resize(ctx, size.Width, size.Height)
}

// Attach joins the container's streams at its monitor.
func (t *cliTask) Attach(ctx context.Context, wanted conmon.Streams) (*stdio.Session, error) {
	return t.attach(ctx, wanted, t.resize)
}

// Start has the runtime hold a lock while it starts the container, because it
// may outlive this server.
func (t *cliTask) Start(ctx context.Context) error {
	if conmon.HeldBack(t.ref.Dir) {
		return t.letGo(ctx)
	}
	lock, err := lockStart(ctx, t.ref, verbTimeout)
	if err != nil {
		return err
	}
	defer lock.Close()
	args, err := t.startArgs(ctx)
	if err == nil {
		_, err = t.runtime.runWith(ctx, t.ref, command{files: []*os.File{lock}}, args...)
	}
	if err != nil {
		return startFailed(t.ref.Dir, err)
	}
	return nil
}

// startArgs returns the arguments of start, with the handler's flags for the
// node's network if the container uses it: a runtime sandbox sets up its network at
// start.
func (t *cliTask) startArgs(ctx context.Context) ([]string, error) {
	a, err := t.runtime.Probe(ctx)
	if err != nil {
		return nil, err
	}
	args := t.runtime.logged(a, runtimeLog(t.ref), []string{"start"})
	if len(a.quirks.hostNetwork) == 0 {
		return args, nil
	}
	spec, err := ReadSpec[specs.Spec](t.ref.Dir)
	if err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	if onHostNetwork(spec.Linux.Namespaces) {
		args = append(slices.Clone(a.quirks.hostNetwork), args...)
	}
	return args, nil
}

// leftStart is how long to wait for a start that an earlier server left
// running. It takes tens of milliseconds; one that hangs must not hold up the
// server.
const leftStart = 5 * time.Second

// Started waits for a start that an earlier server may have left running: as
// long as it hangs, the container may start at any moment.
func (t *cliTask) Started(ctx context.Context) (bool, error) {
	if conmon.HeldBack(t.ref.Dir) {
		return false, nil
	}
	lock, busy := lockStart(ctx, t.ref, leftStart)
	if busy == nil {
		defer lock.Close()
	} else if !errors.Is(busy, fault.Timeout) {
		return false, busy
	}
	out, err := t.runtime.run(ctx, t.ref, nil, "state")
	if err != nil {
		return false, err
	}
	var state struct{ Status string }
	if err := json.Unmarshal(out, &state); err != nil {
		return false, fmt.Errorf("%s state: %w", t.runtime.name, err)
	}
	if state.Status == string(specs.StateCreated) || state.Status == string(specs.StateCreating) {
		return false, busy
	}
	return true, nil
}

// lockStart takes the lock of the container's start, after its present holder,
// if any, has ended.
func lockStart(ctx context.Context, ref Ref, timeout time.Duration) (*os.File, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fault.Timeout)
	defer cancel()
	f, err := os.OpenFile(filepath.Join(ref.Dir, wire.StartLock), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	waited := trace.For(ctx, "start by an earlier server")
	err = flock.TryUntil(ctx, f, 10*time.Millisecond)
	waited()
	if errors.Is(err, flock.ErrBusy) {
		err = fmt.Errorf("a start requested by a previous server is still running: %w", context.Cause(ctx))
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Signal uses a pidfd, not the runtime: that saves a fork and exec, and the
// signal reaches exactly the process that was meant.
func (t *watched) Signal(_ context.Context, sig unix.Signal) error {
	return t.client.Signal(sig)
}

func (t *watched) Kill(ctx context.Context) error {
	// The init first: if it has its own PID namespace the kernel kills the rest
	// with it, and the cgroup is empty before it is checked.
	err := t.client.Signal(unix.SIGKILL)
	return errors.Join(err, emptyCgroup(ctx, t.ref))
}

func (t *cliTask) Update(ctx context.Context, u limits.Update) error {
	return t.ref.limits().Update(ctx, u, t.runtimeUpdate)
}

func (t *cliTask) runtimeUpdate(ctx context.Context, resources *specs.LinuxResources) error {
	a, err := t.runtime.Probe(ctx)
	if err != nil {
		return err
	}
	if m := resources.Memory; a.quirks.swapFirst && m != nil && m.Swap != nil {
		// This fails where the limits are lowered; the order is right for that
		// case.
		_ = t.updateOnce(ctx, &specs.LinuxResources{Memory: &specs.LinuxMemory{Swap: m.Swap}})
	}
	return t.updateOnce(ctx, resources)
}

func (t *cliTask) updateOnce(ctx context.Context, resources *specs.LinuxResources) error {
	text, err := json.Marshal(resources)
	if err != nil {
		return err
	}
	_, err = t.runtime.run(ctx, t.ref, text, "update", "--resources", "/dev/stdin")
	return err
}

func (t *watched) Usage(context.Context) (cgroup.Usage, error) {
	return cgroup.Usage{}, fmt.Errorf("usage is read from the container's cgroup: %w", fault.Unimplemented)
}
