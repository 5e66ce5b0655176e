package oci

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/poll"
	"github.com/crius-run/crius/oci/criu"
)

// Checkpointer is the part of Task that writes down what a running container is.
type Checkpointer interface {
	// MayCheckpoint returns why the container cannot be dumped: its runtime, criu or the node
	// cannot do it (fault.Unimplemented), or nothing but signals reaches it.
	MayCheckpoint(ctx context.Context) error
	// DumpsSandbox reports whether a Dump has the memory of all containers of the pod, and of no moment that a
	// Pause chooses: the runtime pauses its sandbox itself.
	DumpsSandbox() bool
	// Hold waits until the runtime is not starting a command in the container, and has those wait
	// that want to start or kill one until release is called.
	Hold(ctx context.Context) (release func(), err error)
	// Pause freezes the processes of the container, by its own cgroup alone: under a frozen
	// parent a dump would kill it. Only EndDump resumes them.
	Pause(ctx context.Context) error
	// Dump has the runtime write the processes of a paused container to d.Images. They stay
	// paused. If ctx ends, Dump waits until criu has let go of them, for two minutes at most: a
	// killed criu can kill the container. For one that has died it waits some seconds.
	Dump(ctx context.Context, d Dump) error
	// EndDump waits until no process is left of a Dump, even of an earlier server, and resumes
	// the container. It is idempotent, and does not need the container's monitor.
	EndDump(ctx context.Context, cgroup string) error
}

// Dump says where a dump goes.
type Dump struct {
	Images string // existing directory for the images
	Work   string // existing directory for DumpLog and DumpStats
	Cgroup string // cgroup in which runtime and criu run; made and removed
}

// Files that criu leaves in Dump.Work.
const (
	DumpLog   = "dump.log"
	DumpStats = "stats-dump"
)

// DumpCgroup returns the cgroup for a dump of a container, beside this server.
func DumpCgroup(id string) (string, error) {
	own, err := cgroup.Own()
	if err != nil {
		return "", fmt.Errorf("find this service's own cgroup: %w", err)
	}
	return strings.TrimSuffix(own, "/") + "/crius-checkpoint-" + id, nil
}

// setCriuOptions makes crius's file the only options that a runtime passes to criu, whatever the pod,
// the image, the handler or a plugin says.
func setCriuOptions(ref Ref, spec *specs.Spec) {
	if spec.Annotations == nil {
		spec.Annotations = map[string]string{}
	}
	spec.Annotations[criu.Annotation] = ref.criuOptions()
}

func (r Ref) criuOptions() string { return filepath.Join(r.Dir, criu.OptionsFile) }

// checkCriuOptions refuses a container that an earlier crius has created, which left the annotation to pods
// if the operator allowed that.
func checkCriuOptions(ref Ref, spec *specs.Spec) error {
	if spec.Annotations[criu.Annotation] == ref.criuOptions() {
		return nil
	}
	return fmt.Errorf("the container was created by an earlier version of crius, which did not choose the options of criu: only a new container of the pod can be checkpointed: %w", fault.Precondition)
}

// Criu returns the criu of this configuration.
func (t *Table) Criu(ctx context.Context) (criu.Found, error) { return t.node.Load().criu.Ready(ctx) }

// AnnotatedSpec returns the spec of a bundle with additional annotations.
func AnnotatedSpec(bundle string, annotations map[string]string) (*specs.Spec, error) {
	spec, err := ReadSpec[specs.Spec](bundle)
	if err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	if spec.Annotations == nil {
		spec.Annotations = map[string]string{}
	}
	maps.Copy(spec.Annotations, annotations)
	return spec, nil
}

// MountPoints returns where something is mounted over the root file system of a bundle.
func MountPoints(bundle string) ([]string, error) {
	spec, err := ReadSpec[specs.Spec](bundle)
	if err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	var paths []string
	for _, m := range spec.Mounts {
		paths = append(paths, m.Destination)
	}
	return paths, nil
}

func (t *cliTask) MayCheckpoint(ctx context.Context) error {
	if _, _, err := t.runtime.checkpoints(ctx); err != nil {
		return err
	}
	spec, err := ReadSpec[specs.Spec](t.ref.Dir)
	if err != nil {
		return fmt.Errorf("read bundle: %w", err)
	}
	return cmp.Or(checkCriuOptions(t.ref, spec), checkPIDNamespace(spec.Linux.Namespaces))
}

// checkPIDNamespace refuses a container that has no PID namespace of its own: criu dumps one only with its
// first process, which is the pod's or the node's.
func checkPIDNamespace(namespaces []specs.LinuxNamespace) error {
	for _, n := range namespaces {
		if n.Type == specs.PIDNamespace && n.Path == "" {
			return nil
		}
	}
	return fmt.Errorf("the container shares the PID namespace of its pod or of the node (shareProcessNamespace, hostPID), which criu cannot dump: only containers with a PID namespace of their own can be checkpointed: %w", fault.Precondition)
}

// checkpoints returns what a dump needs. Runtimes say by their help whether they know the verb: it
// depends on how they were built.
func (r *cli) checkpoints(ctx context.Context) (*Abilities, criu.Found, error) {
	a, err := r.Probe(ctx)
	if err != nil {
		return nil, criu.Found{}, err
	}
	if _, err := output(ctx, a.Path, "checkpoint", "--help"); err != nil {
		return nil, criu.Found{}, criu.Refuse(fmt.Sprintf("handler %s has %s, which does not know the verb checkpoint", r.name, a.Version))
	}
	found, err := r.node.Load().criu.Ready(ctx)
	return a, found, err
}

func (t *shimTask) MayCheckpoint(context.Context) error {
	return criu.Refuse("handler " + t.runtime.name + " uses a shim")
}

func (t *shimTask) Dump(ctx context.Context, _ Dump) error { return t.MayCheckpoint(ctx) }

func (t *watched) DumpsSandbox() bool { return false }

func (t *cliTask) Hold(ctx context.Context) (func(), error) { return t.commands.shut(ctx) }

func (t *shimTask) Hold(ctx context.Context) (func(), error) { return nil, t.MayCheckpoint(ctx) }

func (t *watched) Pause(ctx context.Context) error { return cgroup.Pause(ctx, t.ref.Cgroup) }

func (t *watched) EndDump(ctx context.Context, group string) error {
	return endDump(ctx, group, t.ref.Cgroup)
}

func (t *cliTask) Dump(ctx context.Context, d Dump) error {
	a, found, err := t.runtime.checkpoints(ctx)
	if err != nil {
		return err
	}
	spec, err := ReadSpec[specs.Spec](t.ref.Dir)
	if err != nil {
		return fmt.Errorf("read bundle: %w", err)
	}
	if err := checkCriuOptions(t.ref, spec); err != nil {
		return err
	}
	ownNetwork := !onHostNetwork(spec.Linux.Namespaces) // or criu would lock connections of the node
	if err := found.WriteOptions(t.ref.criuOptions(), ownNetwork); err != nil {
		return fmt.Errorf("write options of criu: %w", err)
	}
	argv := t.runtime.argv(a, "checkpoint", "--leave-running", "--image-path", d.Images, "--work-path", d.Work, t.ref.ID)
	run := gentle{group: d.Cgroup, argv: argv, env: append(mountItselfIn(t.ref.Dir), found.Environ()...), apart: ownNetwork, aided: true, container: t.ref.Cgroup}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s checkpoint: %w", t.runtime.name, context.Cause(ctx))
	}
	said, err := run.run(ctx)
	if err == nil {
		return checkImages(t.runtime.name, d.Images, "inventory.img")
	}
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%s checkpoint: %w", t.runtime.name, cause)
	}
	text, full := criu.LogError(filepath.Join(d.Work, DumpLog))
	if text == "" {
		text = said
	}
	err = fmt.Errorf("%s checkpoint: %w", t.runtime.name, describe(err, text))
	if full {
		err = fmt.Errorf("%w: %w: %w", err, syscall.ENOSPC, fault.Exhausted)
	}
	return err
}

// checkImages refuses the success of a runtime that has not dumped anything.
func checkImages(runtime, dir, image string) error {
	_, err := os.Stat(filepath.Join(dir, image))
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s checkpoint: the runtime reports success, but has written no images of the container", runtime)
	}
	return err
}

// dumpPatience is how long criu may take after its time is up. It takes about a second for each GiB of
// memory; what takes longer than this hangs.
const dumpPatience = 2 * time.Minute

// mourning is how long criu may take to notice that the container has died. One that hangs keeps the dead processes, which it
// traces, from their parent, so that nobody learns of the end.
const mourning = 3 * time.Second

// gentle is a program that is not killed at once when its time is up.
type gentle struct {
	argv, env []string
	group     string // a cgroup of its own
	// apart: in a network namespace of its own, where criu leaves a firewall table behind if the
	// container dies meanwhile. The one of the container it finds by the container's processes.
	apart bool
	// aided: a criu does the work, and without one the program can be killed.
	aided bool
	// container: cgroup of the container; if nothing of it is alive, nothing is lost with the criu. Empty: not known.
	container string
}

// run returns what the program said. When ctx ends, it waits for the program.
func (g gentle) run(ctx context.Context) (said string, err error) {
	cmd := exec.CommandContext(context.WithoutCancel(ctx), g.argv[0], g.argv[1:]...)
	cmd.Dir, cmd.Env, cmd.WaitDelay = "/", append(inherit.Environ(), g.env...), pipeTime
	diag := &capture.Tail{Max: maxDiagnosis}
	cmd.Stdout, cmd.Stderr = diag, diag
	if err := cgroup.Start(g.group, func(attr *syscall.SysProcAttr) error {
		attr.Setsid = true
		if g.apart {
			if err := ns.Isolate(); err != nil {
				return err
			}
		}
		cmd.SysProcAttr = attr
		return cmd.Start()
	}); err != nil {
		return "", err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		return diag.String(), err
	case <-ctx.Done():
	}
	ctx = context.WithoutCancel(ctx)
	patience, cancel := context.WithTimeout(ctx, dumpPatience)
	defer cancel()
	lived := time.Now()
	poll.Until(patience, 10*time.Millisecond, func() bool {
		if g.aided {
			g.killAlone(cmd.Process)
		}
		if g.container == "" || !empty(g.container) {
			lived = time.Now()
		}
		return len(ended) > 0 || time.Since(lived) > mourning
	})
	if len(ended) == 0 {
		err = killDump(ctx, g.group)
	}
	err = errors.Join(<-ended, err)
	return diag.String(), err // nobody writes it any more
}

// killAlone kills a runtime without a criu: no container depends on it. A criu that it starts at this moment
// continues without it, and EndDump waits for that.
func (g gentle) killAlone(runtime *os.Process) {
	if pids, err := cgroup.Procs(g.group); err == nil && slices.Equal(pids, []int{runtime.Pid}) {
		_ = runtime.Kill() // it may have ended meanwhile
	}
}

// empty reports whether no process of a cgroup is alive.
func empty(group string) bool {
	pids, err := cgroup.Procs(group)
	return err == nil && len(pids) == 0
}

// killDump kills what hangs.
func killDump(ctx context.Context, group string) error {
	slog.WarnContext(ctx, "checkpoint hangs, killing criu, which may kill the container", "cgroup", group)
	ctx, cancel := context.WithTimeout(ctx, lastTime)
	defer cancel()
	return cgroup.Kill(ctx, group)
}

// EndDump is the Task's for a container of which nothing but its id is known, and which has been deleted.
func EndDump(ctx context.Context, group string) error { return endDump(ctx, group, "") }

// endDump waits for the processes of a dump in a cgroup, and thaws the container's.
func endDump(ctx context.Context, group, container string) error {
	if group != "" {
		patience, cancel := context.WithTimeout(ctx, dumpPatience)
		defer cancel()
		if !poll.Until(patience, 10*time.Millisecond, func() bool { return empty(group) }) {
			if err := killDump(ctx, group); err != nil {
				return err
			}
		}
		if err := cgroup.Remove(ctx, group); err != nil {
			return err
		}
	}
	if container != "" {
		cgroup.Thaw(container)
	}
	return nil
}
