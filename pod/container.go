package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/guarded"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/stop"
	"github.com/crius-run/crius/pod/usage"
	"github.com/crius-run/crius/storage"
)

// Container is a container of a pod.
type Container struct {
	containerObject // Life is not held by a stop

	engine  *Engine
	sandbox *Sandbox
	plan    records.ContainerPlan
	runtime oci.Runtime
	ref     oci.Ref
	roots   roots
	cpus    cpus
	meter   *usage.Meter
	logged  guarded.Value[conmon.LogCount] // as last counted

	stop *stop.Stopper
	nri  nri.ContainerEvents

	exited chan struct{} // closed when the exit is known and published

	// shortening is held while the bundle is shortened, and when its removal begins.
	shortening sync.Mutex
}

func (e *Engine) newContainer(id string, s *Sandbox, rec records.Container) *Container {
	ref := e.containerRef(id, rec.ContainerPlan)
	if s.plan.Sandboxed {
		ref.Sandbox = s.ID
	}
	ref.Claim = s.claimExec
	ref.UIDs, ref.GIDs = s.plan.Namespaces.UIDs, s.plan.Namespaces.GIDs
	c := &Container{
		engine:  e,
		sandbox: s,
		plan:    rec.ContainerPlan,
		runtime: s.runtime,
		ref:     ref,
		roots: roots{
			images: e.deps.Images, volumes: rec.Volumes, bundle: ref.Dir,
			own: storage.Rootfs{
				ID: id, ImageID: rec.ImageID, Dir: e.records.Containers.Path(id), Target: ref.Rootfs(),
				MountLabel: rec.MountLabel, UserNS: s.plan.Namespaces.Paths().User,
			},
		},
		cpus:   cpus{tuner: e.tuner, plan: rec.Tuning, id: id, cgroup: rec.Cgroup},
		meter:  usage.NewMeter(s.meters, rec.Cgroup),
		exited: make(chan struct{}),
	}
	c.ID, c.Kind = id, c.kind()
	c.Change(func(now *liveContainer) { now.ContainerState = rec.ContainerState })
	c.nri.Plugins, c.nri.Describe = e.deps.Plugins, c.describe
	c.stop = &stop.Stopper{
		ID: id, Ref: ref, Signal: unix.Signal(c.plan.StopNumber), Exited: c.exited, Work: e.background, Sandboxed: s.plan.Sandboxed,
		Task: func() oci.Task { return c.Now().task },
		Running: func() bool { // as soon as it may, which is before anybody is told that it does
			p := c.Now().Phase
			return p == records.Starting || p == records.Started
		},
	}
	return c
}

func (e *Engine) containerRef(id string, plan records.ContainerPlan) oci.Ref {
	return oci.Ref{
		ID:         id,
		Dir:        filepath.Join(e.cfg.RunDir, "containers", id),
		ExitFile:   filepath.Join(e.records.Containers.Path(id), "exit.json"),
		CgroupPath: plan.CgroupsPath,
		Cgroup:     plan.Cgroup,
	}
}

// CreateContainer creates a container in a pod, up to the point where it can
// be started, and returns its id. Asked again with the same request it joins
// the work, or returns the container if that has not been started yet; the
// same name with another request is fault.Exists. Current is the pod's configuration as the
// kubelet has it now; docs/decisions/0055-current-pod.md says what of it counts.
func (e *Engine) CreateContainer(ctx context.Context, sandboxID string, cfg *cri.ContainerConfig, current *cri.PodSandboxConfig) (string, error) {
	s, err := e.sandboxes.Find(sandboxID)
	if err != nil {
		return "", err
	}
	name := records.NameOfContainer(s.ID, cfg.GetMetadata())
	key, err := requestOf(name, cfg)
	if err != nil {
		return "", err
	}
	return e.creates.Do(ctx, key, func(ctx context.Context) (string, error) {
		ctx, done, err := s.admit(ctx)
		if err != nil {
			return "", err
		}
		defer done()
		id := ids.New(e.mark)
		if owner, ok := e.containers.Reserve(name, id); !ok {
			v, err := e.Container(owner)
			if err == nil && v.State == cri.ContainerState_CONTAINER_CREATED && proto.Equal(v.Config, cfg) {
				return owner, nil
			}
			return "", fmt.Errorf("container %s already exists as %s; remove it or raise metadata.attempt: %w", name, owner, fault.Exists)
		}
		started := time.Now()
		var c *Container
		err = e.deps.Trace.Do(ctx, "create container", name.String(), func(ctx context.Context) (err error) {
			c, err = e.createContainer(ctx, id, s, cfg, current)
			return err
		})
		if err != nil {
			e.containers.Drop(name, id)
			return "", fmt.Errorf("container %s: %w", name, causedBy(ctx, err))
		}
		s.Change(func(now *livePod) { now.add(c) })
		s.room.Free(id)
		e.containers.Publish(id, c)
		c.nri.Created(ctx)
		c.Tell()
		slog.InfoContext(ctx, "container created", "container", id, "pod", s.ID, "name", name.Name, "image", c.plan.ImageID, "took", time.Since(started))
		return id, nil
	})
}

func (e *Engine) createContainer(ctx context.Context, id string, s *Sandbox, cfg *cri.ContainerConfig, current *cri.PodSandboxConfig) (*Container, error) {
	defer cgroup.Warm()()
	image, err := admitImage(ctx, e.deps.Images, s.plan.Config.M, cfg.GetImage())
	if err != nil {
		return nil, err
	}
	if len(image.Files) > 0 {
		return nil, fmt.Errorf("image %s is an OCI artifact, which has files and no program to run; mount it as an image volume: %w", cfg.GetImage().GetImage(), fault.Invalid)
	}
	plan, err := e.planner.Container(blueprint.ContainerRequest{
		ID: id, PodID: s.ID, Pod: &s.plan, Handler: s.runtime.Handler(), Config: cfg, Image: image, At: time.Now(),
		Labels: e.labels, Tuner: e.tuner,
	})
	if err != nil {
		return nil, err
	}
	if plan.Volumes, err = planVolumes(ctx, e.deps.Images, s.plan.Config.M, cfg.GetMounts()); err != nil {
		return nil, err
	}
	src := sources{image: image, privilegedPod: current.GetLinux().GetSecurityContext().GetPrivileged()}
	src.seccomp, err = s.seccompProfile(ctx, cfg)
	if err != nil {
		return nil, err
	}
	state := records.ContainerState{Phase: records.Creating, Resources: records.Message[*cri.LinuxContainerResources]{M: blueprint.FirstLimits(&plan)}}
	c := e.newContainer(id, s, records.Container{ContainerPlan: plan, ContainerState: state})
	if err = c.Put(ctx); err == nil {
		err = panics.Do(ctx, "build container", func() error { return c.build(ctx, src) })
	}
	if err != nil {
		ctx, cancel := undoContext(ctx)
		defer cancel()
		c.nri.Undone(ctx)
		if undo := c.teardown(ctx); undo != nil {
			slog.WarnContext(ctx, "cleanup after failed container creation incomplete, retrying", "container", id, "err", undo)
			e.cleanups.Add(id, c.teardown)
		}
		return nil, err
	}
	c.Publish()
	e.background.Go("watch container", c.watch)
	return c, nil
}

// build makes the container.
// What it made before an error is left to teardown.
func (c *Container) build(ctx context.Context, src sources) error {
	mounts := c.plan.Config.M.GetMounts()
	ensureSources, endLook := c.engine.paths.Prepare(ctx, mounts)
	defer endLook()
	if err := trace.Call(ctx, "make container directories", c.makeDirs); err != nil {
		return err
	}
	mount := func(ctx context.Context) ([]string, error) { return c.roots.mount(ctx, mounts) }
	mounted, err := trace.Get(ctx, "mount root file system", mount)
	if err != nil {
		return err
	}
	in, err := c.resolve(ctx, src.image)
	if err != nil {
		return err
	}
	in.Asked.Seccomp, in.Request.PrivilegedPod = src.seccomp, src.privilegedPod
	release, err := c.holdPIDNamespace(&in)
	if err != nil {
		return err
	}
	defer release()
	in.Facts.MountSources = mounted
	c.Change(func(now *liveContainer) { now.User.M = in.Facts.User.CRI() })
	ociSpec, err := c.makeSpec(ctx, in)
	if err != nil {
		return err
	}
	// Before the plugins are asked: as long as a container is being made that they know
	// of, no new plugin is let in, and then every verb waits. Volumes may take long. So may
	// a runtime, whose container is refused then if a plugin has come meanwhile.
	if err := ensureSources(); err != nil {
		return err
	}
	if err := c.engine.labels.Relabel(ctx, c.engine.paths.HostPaths, &c.sandbox.plan, &c.plan); err != nil {
		return err
	}
	ask := func(ctx context.Context) error { return c.askPlugins(ctx, ociSpec) }
	if err := trace.Do(ctx, "call NRI plugins", ask); err != nil {
		return err
	}
	if err := c.claimRoom(oci.SpecSize(ociSpec)); err != nil {
		return err
	}
	create := func(ctx context.Context) (oci.Task, error) {
		return c.runtime.Create(ctx, c.ref, ociSpec, blueprint.IO(c.ID, &c.sandbox.plan, &c.plan))
	}
	if err := c.createTask(ctx, create); err != nil {
		return c.engine.paths.Explain(ctx, mounts, err)
	}
	if err := c.nri.Confirm(); err != nil {
		return err
	}
	c.Change(func(now *liveContainer) { now.Phase = records.Created })
	return c.Put(ctx)
}

// createTask has the runtime create the container. One whose own program the
// runtime refuses has been created all the same, as far as the kubelet is told,
// and it is its start that fails: pods whose creation fails are tried for ever,
// also jobs and those of restartPolicy Never (docs/decisions/0021-start-errors.md).
func (c *Container) createTask(ctx context.Context, create func(context.Context) (oci.Task, error)) error {
	err := trace.Do(ctx, "runtime create", func(ctx context.Context) error {
		task, err := create(ctx)
		if err == nil {
			c.setTask(task, false)
		}
		return err
	})
	program, ok := errors.AsType[*oci.ProgramError](err)
	if !ok {
		return err
	}
	deleteTask := func(ctx context.Context) error { return c.runtime.Delete(ctx, c.ref) }
	if err := trace.Do(ctx, "delete container", deleteTask); err != nil {
		return errors.Join(program, fmt.Errorf("delete from runtime: %w", err))
	}
	slog.InfoContext(ctx, "runtime cannot run the container's program, start will fail", "container", c.ID, "err", program)
	c.Change(func(now *liveContainer) { now.StartError, now.StartedAt = program.Error(), time.Time{} })
	c.setTask(oci.Unstartable(program, records.StartErrorCode), false)
	return nil
}

// StartContainer runs a created container.
func (e *Engine) StartContainer(ctx context.Context, id string) error {
	c, err := e.containers.Find(id)
	if err != nil {
		return err
	}
	return e.run(ctx, verb{"start", c.ID}, func(ctx context.Context) error {
		c.Life.Lock()
		defer c.Life.Unlock()
		if err := c.start(ctx); err != nil {
			return fmt.Errorf("start container %s: %w", c.ID, err)
		}
		return nil
	})
}

func (c *Container) start(ctx context.Context) error {
	if state := c.View().State; state != cri.ContainerState_CONTAINER_CREATED {
		return fmt.Errorf("container is in state %s, only a created container can be started: %w", state, fault.Precondition)
	}
	if err := c.mayStart(); err != nil {
		return err
	}
	now := c.Now()
	if refused := now.Refused(); refused != nil {
		return c.failStart(ctx, refused)
	}
	c.nri.Begin()
	if err := c.nri.Plugins.StartContainer(ctx, c.describe); err != nil {
		return c.failStart(ctx, err)
	}
	if err := c.cpus.tune(ctx); err != nil {
		return c.failStart(ctx, err)
	}
	// Killed between here and the put below, a restarted server cannot tell
	// from the record whether the program runs, and asks the runtime. When it
	// did the record does tell, which may be long before that; and before the
	// runtime returns, for a short life may be over then.
	started := time.Now()
	c.Change(func(now *liveContainer) { now.Phase, now.StartedAt = records.Starting, started })
	if err := c.Put(ctx); err != nil {
		c.Change(func(now *liveContainer) { now.Phase, now.StartedAt = records.Created, time.Time{} })
		c.nri.End(ctx, nil)
		return err
	}
	if err := trace.Do(ctx, "runtime start", c.Now().task.Start); err != nil {
		return c.failStart(ctx, err)
	}
	c.Change(func(now *liveContainer) { now.Phase = records.Started })
	c.Publish()
	c.Tell()
	if err := c.Put(ctx); err != nil { // but it runs, and recovery would find that out
		slog.WarnContext(ctx, "container start not recorded, retrying", "container", c.ID, "err", err)
		c.engine.cleanups.Add(c.ID, c.recordStart)
	}
	slog.InfoContext(ctx, "container started", "container", c.ID, "pod", c.sandbox.ID, "pid", c.Now().task.PID())
	c.nri.End(ctx, c.nri.Plugins.ContainerStarted)
	return nil
}

// mayStart refuses a start that would only end the container.
func (c *Container) mayStart() error {
	now := c.Now()
	if now.unreachable {
		return fmt.Errorf("its monitor has not answered since the server started; see crius check: %w", fault.Unavailable)
	}
	if now.Phase == records.Starting {
		return fmt.Errorf("a start requested by a previous server is still running: %w", fault.Unavailable)
	}
	return nil
}

// recordStart records a start that could not be recorded when it happened.
func (c *Container) recordStart(ctx context.Context) error { return c.Finish(ctx, c.Put) }

// failStart ends a container whose start failed: it will never be startable.
func (c *Container) failStart(ctx context.Context, cause error) error {
	if c.stop.Asked() { // and a step has met a container that was dead, or that nobody knew any more
		cause = fmt.Errorf("stopped while starting: %s: %w", cause.Error(), fault.Precondition)
	}
	ctx, cancel := undoContext(ctx)
	defer cancel()
	c.Change(func(now *liveContainer) { now.StartError, now.StartedAt = cause.Error(), time.Time{} })
	err := errors.Join(cause, c.Put(ctx), c.stop.Kill(ctx))
	c.restoreCPUs() // of a container that was dead before
	c.nri.End(ctx, nil)
	c.Publish() // it may have been dead before, and said to have ended otherwise
	c.Tell()
	return err
}

// StopContainer ends a container: its stop signal, and SIGKILL once grace is
// over. It returns when the container is dead, when the caller's time is up, or
// with fault.Timeout if the container does not die of SIGKILL; the stop goes on
// in any case. Unknown ids and containers that are dead are no
// error (CRI: StopContainer).
func (e *Engine) StopContainer(ctx context.Context, id string, grace time.Duration) error {
	c, err := e.containers.Find(id)
	if err != nil {
		return doneIfAbsent(err)
	}
	err = e.deps.Trace.Do(ctx, "stop", c.ID, func(ctx context.Context) error { return c.end(ctx, grace) })
	if err != nil {
		return fmt.Errorf("stop container %s: %w", c.ID, err)
	}
	c.nri.Stopped(ctx)
	return nil
}

// RemoveContainer kills the container if it runs, and removes it and its record. It is
// idempotent, and unknown ids are no error.
func (e *Engine) RemoveContainer(ctx context.Context, id string) error {
	c, err := e.containers.Find(id)
	if err != nil {
		return doneIfAbsent(err)
	}
	return e.run(ctx, verb{"remove", c.ID}, c.remove)
}

func (c *Container) remove(ctx context.Context) error {
	c.Life.Lock()
	defer c.Life.Unlock()
	if c.Now().Phase == records.Removing {
		return nil // by a call that was here before us
	}
	if err := c.kill(ctx); err != nil {
		return fmt.Errorf("remove container %s: %w", c.ID, err)
	}
	c.Tell() // of its end; watch may not have come to it
	c.nri.Stopped(ctx)
	c.nri.Plugins.RemoveContainer(ctx, c.describe)
	c.countLog(ctx)
	if err := c.teardown(ctx); err != nil {
		slog.WarnContext(ctx, "cleanup after container removal incomplete, retrying", "container", c.ID, "err", err)
		c.sandbox.room.Keep(c.ID, c.use())
		c.engine.cleanups.Add(c.ID, c.teardown)
	}
	c.retire()
	c.sandbox.Change(func(pod *livePod) { pod.drop(c) })
	c.Change(func(now *liveContainer) { now.gone = true })
	c.Tell()
	slog.InfoContext(ctx, "container removed", "container", c.ID, "pod", c.sandbox.ID)
	return nil
}

// overtaken is the error of a verb that needs a container which is alive. If it has exited
// meanwhile the verb may have met anything that goes with it: a cgroup or a directory that is
// not there any more, or a shim.
func overtaken(ctx context.Context, by oci.Task, err error) error {
	if ctx.Err() != nil || errors.Is(err, fault.Precondition) || errors.Is(err, fault.Timeout) || !oci.Exited(by) {
		return err
	}
	return fmt.Errorf("container has exited meanwhile: %s: %w", err.Error(), fault.Precondition)
}

// ReopenContainerLog makes a running container's log go on in a new file. On an
// error the old file stays the log.
//
// A kubelet that evicts a pod may remove the pod's log directory before the
// containers have ended, and still ask for their logs to be opened again: that is
// fault.Precondition. The directory is not made again, nor do CRI-O and containerd
// make it: it is the kubelet's, who would only have to remove it once more. If it
// comes back, so does the log, with the next call.
func (e *Engine) ReopenContainerLog(ctx context.Context, id string) error {
	c, err := e.containers.Find(id)
	if err != nil {
		return err
	}
	if state := c.View().State; state != cri.ContainerState_CONTAINER_RUNNING {
		return fmt.Errorf("container %s is in state %s; reopening the log requires a running container: %w", c.ID, state, fault.Precondition)
	}
	return e.deps.Trace.Do(ctx, "reopen log", c.ID, func(ctx context.Context) error {
		err := trace.Do(ctx, "reopen log", c.Now().task.ReopenLog)
		if err == nil {
			return nil
		}
		dir := filepath.Dir(c.plan.LogPath)
		if _, statErr := os.Lstat(dir); errors.Is(statErr, os.ErrNotExist) {
			return fmt.Errorf("log directory %s has been removed; output continues to the deleted log file: %w: %w", dir, err, fault.Precondition)
		}
		return err
	})
}

// makeDirs makes the places that belong to the container.
func (c *Container) makeDirs() error {
	if err := os.MkdirAll(c.ref.Rootfs(), 0o700); err != nil {
		return err
	}
	if err := c.sandbox.files.LetIn(c.ref.Dir); err != nil {
		return err
	}
	if c.plan.LogPath == "" {
		return nil
	}
	return files.MakeLogDir(c.sandbox.plan.Config.M.GetLogDirectory(), c.plan.Config.M.GetLogPath())
}
