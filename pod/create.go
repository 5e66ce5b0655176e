package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/flight"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// CreateContainer creates a container in a pod, ready to be started, and returns its id. A
// repeated call with the same request joins the work, or returns the container if it has not
// been started yet; the same name with another request is fault.Exists. Current is the pod's
// configuration as the kubelet has it now; docs/decisions/0055-current-pod.md says which parts
// of it count.
func (e *Engine) CreateContainer(ctx context.Context, sandboxID string, cfg *cri.ContainerConfig, current *cri.PodSandboxConfig) (string, error) {
	s, err := e.sandboxes.Find(sandboxID)
	if err != nil {
		return "", err
	}
	name := records.NameOfContainer(s.ID, cfg.GetMetadata())
	key, err := requestOf(name, canonicalContainer(cfg))
	if err != nil {
		return "", err
	}
	return e.creates.Do(ctx, key, func(ctx context.Context) (string, error) {
		return e.createIn(ctx, s, cfg, sources{privilegedPod: privileged(current), retried: true})
	})
}

func privileged(pod *cri.PodSandboxConfig) bool {
	return pod.GetLinux().GetSecurityContext().GetPrivileged()
}

// createIn creates a container in a pod, from a checkpoint if src has one.
func (e *Engine) createIn(ctx context.Context, s *Sandbox, cfg *cri.ContainerConfig, src sources) (string, error) {
	name := records.NameOfContainer(s.ID, cfg.GetMetadata())
	ctx, done, err := s.admit(ctx)
	if err != nil {
		return "", err
	}
	defer done()
	id := ids.New(e.mark)
	if owner, ok := e.containers.Reserve(name, id); !ok {
		v, err := e.Container(owner)
		if err != nil {
			return "", beingCreated("container", name, owner)
		}
		if src.checkpoint == nil && v.State == cri.ContainerState_CONTAINER_CREATED && proto.Equal(canonicalContainer(v.Config), canonicalContainer(cfg)) {
			return owner, nil
		}
		return "", fmt.Errorf("container %s already exists as %s; remove it or raise metadata.attempt: %w", name, owner, fault.Exists)
	}
	started := time.Now()
	var c *Container
	err = e.deps.Trace.Do(ctx, "create container", name.String(), func(ctx context.Context) (err error) {
		if c, err = e.createContainer(ctx, id, s, cfg, src); err == nil && src.retried {
			awaitRetry(ctx)
		}
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
}

// retryTime is how long a created container waits for its caller's retry. Kubelets retry after 10 to 15 seconds, and later
// if they have much to do.
const retryTime = 2 * time.Minute

// awaitRetry returns when somebody waits for the creation that has ended. A kubelet whose call has timed out, and that finds the
// container created before it retries, has the next attempt created in its place, which takes as long again.
func awaitRetry(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, retryTime)
	defer cancel()
	_ = trace.Wait(ctx, trace.Waiting{Name: "wait for the caller's retry", Patient: true}, func(ctx context.Context) error {
		flight.Await(ctx)
		return nil
	})
}

func (e *Engine) createContainer(ctx context.Context, id string, s *Sandbox, cfg *cri.ContainerConfig, src sources) (*Container, error) {
	defer cgroup.Warm()()
	image, err := admitImage(ctx, e.deps.Images, s.plan.Config.M, cfg.GetImage())
	if err != nil {
		return nil, err
	}
	if len(image.Files) > 0 {
		return nil, fmt.Errorf("image %s is an OCI artifact, which has files and no program to run; mount it as an image volume: %w", cfg.GetImage().GetImage(), fault.Invalid)
	}
	plan, err := e.planner().Container(blueprint.ContainerRequest{
		ID: id, PodID: s.ID, Pod: &s.plan, Handler: s.runtime.Handler(), Config: cfg, Image: image, At: s.containerTime(cfg.GetMetadata()),
		Labels: e.labels, Tuner: e.tuner,
	})
	if err != nil {
		return nil, err
	}
	if image.Config != nil && image.Config.StopSignal != "" && cfg.GetStopSignal() == cri.Signal_SIGNAL_RUNTIME_DEFAULT {
		if _, _, ok := spec.ImageStopSignal(image.Config.StopSignal); !ok {
			slog.WarnContext(ctx, "STOPSIGNAL of the image cannot be sent to a container, stopping with SIGTERM", "container", id, "image", image.ID, "signal", image.Config.StopSignal)
		}
	}
	if e.labels.Ignores(s.plan.Config.M, cfg) {
		e.seLinuxIgnored.Do(func() {
			slog.WarnContext(ctx, "seLinuxOptions of pods have no effect: SELinux is not enabled on this node, or pod.selinux is false", "pod", s.ID)
		})
	}
	if plan.Volumes, err = admitVolumes(ctx, e.deps.Images, s.plan.Config.M, cfg.GetMounts()); err != nil {
		return nil, err
	}
	src.image = image
	if err := src.checkpoint.fits(&plan); err != nil {
		return nil, err
	}
	src.seccomp, err = s.seccompProfile(ctx, cfg)
	if err != nil {
		return nil, err
	}
	src.pulled, err = s.engine.pulledProfile(ctx, cfg.GetLinux().GetSecurityContext().GetSeccomp(), s.plan.Config.M)
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

// admit ties the creation of a container to its pod: the end of the pod cancels it. The caller
// calls done when the container belongs to the pod or is gone.
func (s *Sandbox) admit(ctx context.Context) (_ context.Context, done func(), _ error) {
	if err := s.checkAlive(); err != nil {
		return nil, nil, err
	}
	admitted := false
	s.Change(func(now *livePod) {
		if admitted = s.ending.Err() == nil && now.Phase == records.Ready; admitted {
			s.creating.Add(1)
		}
	})
	if !admitted {
		return nil, nil, fmt.Errorf("pod %s is not ready: %w", s.ID, fault.Precondition)
	}
	ctx, cancel := until(ctx, s.ending)
	return ctx, func() {
		cancel()
		s.creating.Done()
	}, nil
}

// sources are inputs of a container's spec that are not in its plan.
type sources struct {
	image         *storage.Image
	seccomp       *spec.Profile // requested by an annotation of the pod; nil: none
	pulled        *spec.Profile // named by oci_ref of the request; nil: none
	privilegedPod bool          // according to the pod's configuration at the time of the create
	checkpoint    *origin       // from which it is restored; nil: it is a new one
	retried       bool          // its caller asks again if it has stopped waiting
}

// build makes the container. After an error, teardown removes what it made.
func (c *Container) build(ctx context.Context, src sources) error {
	mounts := c.plan.Config.M.GetMounts()
	ensureSources, endLook := c.engine.paths.Prepare(ctx, mounts)
	defer endLook()
	if err := c.sandbox.remakeFiles(ctx); err != nil {
		return err
	}
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
	in.Asked.Seccomp, in.Facts.PulledSeccomp, in.Request.PrivilegedPod = src.seccomp, src.pulled, src.privilegedPod
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
	// This comes before the plugins are asked: while a container that plugins know of is being
	// created, no new plugin can connect, and then all verbs wait. Volumes may take long. So
	// may a runtime; its container is refused if a plugin has connected meanwhile.
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
	spec.MapOwners(&in, ociSpec)
	if err := c.makeDevices(ctx, &in, ociSpec); err != nil {
		return err
	}
	if err := spec.FollowLinks(ociSpec); err != nil {
		return err
	}
	if err := c.claimRoom(oci.SpecSize(ociSpec)); err != nil {
		return err
	}
	create := func(ctx context.Context) (oci.Task, error) {
		io := blueprint.IO(c.ID, &c.sandbox.plan, &c.plan)
		if src.checkpoint != nil {
			return c.restore(ctx, ociSpec, io, src.checkpoint)
		}
		return c.runtime.Create(ctx, c.ref, ociSpec, io)
	}
	if err := c.createTask(ctx, create); err != nil {
		return c.engine.paths.Explain(ctx, mounts, c.plan.BlameProfile(err))
	}
	if err := c.nri.Confirm(); err != nil {
		return err
	}
	c.Change(func(now *liveContainer) { now.Phase = records.Created })
	return c.Put(ctx)
}

// makeDirs makes the directories of the container.
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

// createTask has the runtime create the container. If the runtime refuses the container's own
// program, the container counts as created for the kubelet, and its start fails: the kubelet
// retries failed creations forever, even in jobs and pods with restartPolicy Never
// (docs/decisions/0021-start-errors.md).
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
