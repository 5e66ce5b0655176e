package pod

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/criu"
	"github.com/crius-run/crius/storage/checkpoint"
)

// checkpointTime bounds a checkpoint for which the caller has set no time limit.
const checkpointTime = 10 * time.Minute

// CheckpointContainer writes what a running container is, its memory included, to a new archive at
// the absolute path location. The container is frozen meanwhile and continues afterwards. timeout 0
// means a limit of crius's own; the error is fault.Timeout if it is exceeded, and fault.Exists if
// there is such a file. A node that cannot do it is fault.Unimplemented.
func (e *Engine) CheckpointContainer(ctx context.Context, id, location string, timeout time.Duration) error {
	c, err := e.containers.Find(id)
	if err != nil {
		return err
	}
	work := func(ctx context.Context) error {
		ctx, cancel := limited(ctx, cmp.Or(timeout, checkpointTime))
		defer cancel()
		return c.checkpointTo(ctx, location)
	}
	_, err = e.verbs.Do(ctx, verb{"checkpoint to " + location, c.ID}, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, e.deps.Trace.Do(ctx, "checkpoint", c.ID, work)
	})
	if err != nil {
		return fmt.Errorf("checkpoint container %s: %w", c.ID, err)
	}
	return nil
}

func limited(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, limit, fmt.Errorf("not finished within %s: %w", limit.Round(time.Second), fault.Timeout))
}

func (c *Container) checkpointTo(ctx context.Context, location string) error {
	if err := c.mayCheckpoint(ctx); err != nil {
		return err
	}
	dir, name := filepath.Split(location)
	target, err := checkpoint.OpenTarget(dir)
	if err != nil {
		return err
	}
	defer target.Close()
	if target.Has(name) {
		return fmt.Errorf("%s exists already, choose another name: %w", location, fault.Exists)
	}
	temporary := temporaryName()
	part := checkpoint.Part{Dir: c.partDir()}
	s := &snapshot{target: target, dir: dir, archive: true, members: []*member{{Container: c, part: part, unfinished: []string{temporary}}}}
	return s.take(ctx, func(ctx context.Context) error { return target.PutArchive(ctx, part, temporary, name) })
}

// temporaryName returns a name in a caller's directory that nobody else has.
func temporaryName() string { return ".crius-checkpoint-" + rand.Text() }

// partDir returns the directory for the files of a checkpoint that becomes an archive.
func (c *Container) partDir() string {
	return filepath.Join(c.engine.records.Containers.Path(c.ID), "checkpoint")
}

// CheckpointSandbox writes running containers of a pod to an empty directory, all as they were at
// one moment: all are frozen before the first is written down, and resumed before it returns. ctx
// needs a deadline. If it fails, the directory is empty again.
func (e *Engine) CheckpointSandbox(ctx context.Context, id, dir string, containers []string) error {
	s, err := e.sandboxes.Find(id)
	if err != nil {
		return err
	}
	members, err := s.selected(containers)
	if err != nil {
		return fmt.Errorf("checkpoint pod %s: %w", s.ID, err)
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		return fmt.Errorf("checkpoint pod %s: the call has no deadline, set one: %w", s.ID, fault.Invalid)
	}
	left := time.Until(deadline)
	work := func(ctx context.Context) error {
		// The containers are resumed before the caller's deadline, as CRI wants it.
		ctx, cancel := limited(ctx, left-min(left/10, 5*time.Second))
		defer cancel()
		return s.checkpointTo(ctx, dir, members)
	}
	_, err = e.verbs.Do(ctx, verb{"checkpoint to " + dir, s.ID}, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, e.deps.Trace.Do(ctx, "checkpoint pod", s.ID, work)
	})
	if err != nil {
		return fmt.Errorf("checkpoint pod %s: %w", s.ID, err)
	}
	return nil
}

// selected returns the containers of the pod with these ids.
func (s *Sandbox) selected(containers []string) ([]*Container, error) {
	if s.View().State != cri.PodSandboxState_SANDBOX_READY {
		return nil, fmt.Errorf("the pod is not ready, only a ready pod can be checkpointed: %w", fault.Precondition)
	}
	var found []*Container
	names := map[string]bool{}
	for _, id := range containers {
		c, err := s.engine.containers.Find(id)
		if err != nil {
			return nil, err
		}
		if c.sandbox != s {
			return nil, fmt.Errorf("container %s belongs to another pod: %w", c.ID, fault.Invalid)
		}
		if slices.Contains(found, c) {
			return nil, fmt.Errorf("container %s is listed twice: %w", c.ID, fault.Invalid)
		}
		name := c.plan.Config.M.GetMetadata().GetName()
		if names[name] {
			return nil, fmt.Errorf("two of the containers have the name %q, by which a restore tells them apart: checkpoint one of them: %w", name, fault.Precondition)
		}
		names[name] = true
		found = append(found, c)
	}
	return found, nil
}

func (s *Sandbox) checkpointTo(ctx context.Context, dir string, containers []*Container) error {
	for _, c := range containers {
		if err := c.mayCheckpoint(ctx); err != nil {
			return err
		}
		if c.Now().task.DumpsSandbox() {
			return criu.Refuse("handler " + s.plan.Handler + " writes checkpoints of containers only, not of pods")
		}
	}
	target, err := checkpoint.OpenTarget(dir)
	if err != nil {
		return err
	}
	defer target.Close()
	if err := target.Claim(); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if empty, err := target.Empty(); err != nil {
		return err
	} else if !empty {
		return fmt.Errorf("%s is not empty, choose an empty directory: %w", dir, fault.Precondition)
	}
	if err := s.engine.checkUnreachable(target); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	key, err := checkpoint.NodeKey(s.engine.cfg.StateDir) // before anything is frozen
	if err != nil {
		return err
	}
	request, err := s.restoreRequest(containers)
	if err != nil {
		return err
	}
	temporary := temporaryName()
	// Of all containers: a crash may leave one of them whose checkpoint counts as unfinished.
	unfinished := []string{checkpoint.Manifest, checkpoint.Signature, checkpoint.Shm, checkpoint.Request, temporary}
	for _, c := range containers {
		unfinished = append(unfinished, c.ID)
	}
	shot := &snapshot{target: target, dir: dir, shm: s.files.Shm()}
	for _, c := range containers {
		shot.members = append(shot.members, &member{Container: c, part: target.PartIn(c.ID), unfinished: unfinished})
	}
	return shot.take(ctx, func(ctx context.Context) error {
		for _, m := range shot.members {
			if err := cmp.Or(ctx.Err(), m.part.Sync()); err != nil {
				return causedBy(ctx, err)
			}
		}
		return s.putManifest(ctx, shot, request, key, temporary)
	})
}

// putManifest writes what makes the directory a checkpoint: a signed list of its files. request is one of them.
func (s *Sandbox) putManifest(ctx context.Context, shot *snapshot, request []byte, key ed25519.PrivateKey, temporary string) (err error) {
	m := s.manifest(shot)
	if len(request) > checkpoint.MaxRequest {
		slog.WarnContext(ctx, "checkpoint without requests: they are too large, crius restore cannot use it", "pod", s.ID, "bytes", len(request))
	} else if err := shot.target.PutRequest(request, temporary); err != nil {
		return err
	} else {
		m.Request = checkpoint.Request
	}
	if m.Files, err = shot.target.Digests(ctx); err != nil {
		return causedBy(ctx, err)
	}
	if err := m.Check(); err != nil {
		return fmt.Errorf("nothing could restore this checkpoint; checkpoint fewer containers, or each alone: %s: %w", fault.Text(err), fault.Exhausted)
	}
	if err := s.engine.checkUnreachable(shot.target); err != nil { // a container may have started meanwhile
		return err
	}
	return shot.target.PutManifest(m, key, temporary)
}

// manifest says what a checkpoint of the pod consists of.
func (s *Sandbox) manifest(shot *snapshot) checkpoint.PodManifest {
	meta := s.plan.Config.M.GetMetadata()
	m := checkpoint.NewPodManifest(checkpoint.PodManifest{
		PodID: s.ID, Name: meta.GetName(), Namespace: meta.GetNamespace(), UID: meta.GetUid(),
		Handler: s.plan.Handler, CheckpointedAt: shot.at,
	})
	for _, c := range shot.members {
		m.Containers = append(m.Containers, checkpoint.PodPart{
			ID: c.ID, Name: c.plan.Config.M.GetMetadata().GetName(), ImageID: c.plan.ImageID, ImageRef: c.plan.ImageRef, Directory: c.ID, Bytes: c.part.Size(),
		})
	}
	if shot.shm != "" {
		m.SharedMemory = checkpoint.Shm
	}
	return m
}

// checkpointConfig describes the container for those who read its checkpoint.
func (c *Container) checkpointConfig(at time.Time) checkpoint.Config {
	cfg := c.plan.Config.M
	return checkpoint.Config{
		ID: c.ID, Name: cfg.GetMetadata().GetName(), Runtime: c.plan.Handler,
		ImageID: c.plan.ImageID, ImageRef: c.plan.ImageRef,
		ImageName: cmp.Or(cfg.GetImage().GetUserSpecifiedImage(), cfg.GetImage().GetImage()),
		CreatedAt: c.plan.CreatedAt, CheckpointedAt: at, Format: c.imageFormat(),
	}
}

// imageFormat says what has written the images of a checkpoint of the container.
func (c *Container) imageFormat() string {
	if task := c.Now().task; task != nil && task.DumpsSandbox() {
		return checkpoint.FormatGvisor
	}
	return checkpoint.FormatCriu
}

// putConfig writes the spec of the container with the annotations by which checkpointctl recognizes a
// container of CRI-O, the form of archive that crius writes.
func (c *Container) putConfig(part checkpoint.Part, at time.Time) error {
	config := c.checkpointConfig(at)
	pod := c.sandbox.View()
	meta := c.sandbox.plan.Config.M.GetMetadata()
	spec, err := oci.AnnotatedSpec(c.ref.Dir, checkpoint.Annotations(config, checkpoint.Owner{
		PodName: meta.GetName(), PodNamespace: meta.GetNamespace(), PodUID: meta.GetUid(), IPs: pod.IPs,
		Attempt: c.plan.Config.M.GetMetadata().GetAttempt(), LogPath: c.plan.LogPath,
	}))
	if err != nil {
		return err
	}
	return part.PutConfig(config, spec)
}

// mayCheckpoint refuses a checkpoint of a container that is not running or cannot be dumped.
func (c *Container) mayCheckpoint(ctx context.Context) error {
	now := c.Now()
	switch state := c.View().State; {
	case now.unreachable:
		return fmt.Errorf("the monitor of container %s has not answered since the server started; see crius check: %w", c.ID, fault.Unavailable)
	case state != cri.ContainerState_CONTAINER_RUNNING:
		return fmt.Errorf("container %s is in state %s, only a running container can be checkpointed: %w", c.ID, state, fault.Precondition)
	case c.stop.Asked():
		return errStopping
	}
	if err := c.beingStarted(); err != nil {
		return err
	}
	if err := cmp.Or(now.task.MayCheckpoint(ctx), c.checkAlone(now.task)); err != nil {
		return causedBy(ctx, err) // a probe that was ended says nothing of the runtime
	}
	return nil
}

// checkAlone refuses a dump that would have the memory of other containers.
func (c *Container) checkAlone(task oci.Task) error {
	if !task.DumpsSandbox() {
		return nil
	}
	for _, other := range c.sandbox.Now().containers {
		if other != c && other.View().State != cri.ContainerState_CONTAINER_EXITED {
			return fmt.Errorf("the runtime sandbox of the pod has another container, %s, whose memory would be in the checkpoint: only the container of a pod with one can be checkpointed with this handler: %w", other.ID, fault.Precondition)
		}
	}
	return nil
}

var errStopping = fmt.Errorf("the container is being stopped and cannot be checkpointed: %w", fault.Precondition)

// beingCheckpointed is the error of what needs processes that run.
func (c *Container) beingCheckpointed() error {
	if d := c.dump.Load(); d == nil || !d.paused.Load() {
		return nil
	}
	return fmt.Errorf("container %s is being checkpointed, try again later: %w", c.ID, fault.Unavailable)
}

// interruptCheckpoint ends a checkpoint of the container, if one is under way, and reports whether it
// was. It does not wait for it.
func (c *Container) interruptCheckpoint() bool {
	d := c.dump.Load()
	if d != nil {
		d.cancel(errStopping)
	}
	return d != nil
}

// releasedBy interrupts a checkpoint of the container, waits until criu has let go of its processes, for as
// long as grace at most, and returns what is left of that, but some time for the stop signal in any case. A
// stop signal in the middle of a dump may be lost, and a thaw disturbs it; SIGKILL needs no patience.
func (c *Container) releasedBy(grace time.Duration) time.Duration {
	d := c.dump.Load()
	if !c.interruptCheckpoint() || d == nil || grace <= 0 {
		return grace
	}
	began := time.Now()
	select {
	case <-d.done:
	case <-c.exited:
	case <-time.After(grace):
	}
	const least = 2 * time.Second
	return max(min(grace, least), grace-time.Since(began))
}

var errTwice = fmt.Errorf("another checkpoint of the container is under way, try again later: %w", fault.Unavailable)
