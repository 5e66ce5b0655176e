package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/cdi"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage/checkpoint"
)

// RestoreRequest asks for a pod from a checkpoint of one.
type RestoreRequest struct {
	Dir        string // absolute path of the checkpoint
	Manifest   string // hexadecimal SHA-256 of its manifest; empty: any
	Handler    string // "" is the default one
	Pod        *cri.PodSandboxConfig
	Containers []*cri.ContainerConfig
}

// OptionManifest is the option of RestorePod by which a caller names the checkpoint that its request was made for: the
// hexadecimal SHA-256 of its manifest. The directory may be replaced until the server opens it.
const OptionManifest = "checkpoint.crius.run/manifest-sha256"

// RestoreSandbox makes a pod with all containers of a checkpoint, and returns its id. The containers are created,
// and none of their processes has run: each goes on when it is started. ctx needs a deadline. If it fails,
// nothing is left of the pod.
func (e *Engine) RestoreSandbox(ctx context.Context, req RestoreRequest) (string, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return "", fmt.Errorf("restore pod: the call has no deadline, set one: %w", fault.Invalid)
	}
	left := time.Until(deadline)
	if !e.policy().Restore {
		return "", fmt.Errorf("restore pod: restoring checkpoints is disabled on this node, set runtime.restore to allow it: %w", fault.Unimplemented)
	}
	run, err := e.podRequest(ctx, req.Handler, req.Pod)
	if err != nil {
		return "", fmt.Errorf("restore pod: %w", err)
	}
	run.restoring = true
	name := records.NameOfPod(req.Pod.GetMetadata())
	key, err := requestOf(restoreOf{name, req.Dir, req.Manifest}, messages(run.handler, req)...)
	if err != nil {
		return "", err
	}
	return e.creates.Do(ctx, key, func(ctx context.Context) (id string, err error) {
		// What has been made is removed before the caller's deadline.
		ctx, cancel := limited(ctx, left-min(left/10, 5*time.Second))
		defer cancel()
		err = e.deps.Trace.Do(ctx, "restore pod", name.String(), func(ctx context.Context) (err error) {
			if err = e.mayRestore(ctx, run, req.Containers); err == nil {
				id, err = e.restoreSandbox(ctx, run, req)
			}
			return causedBy(ctx, err)
		})
		if err != nil {
			return "", fmt.Errorf("restore pod: %w", err)
		}
		return id, nil
	})
}

// messages returns what makes two requests the same.
func messages(handler string, req RestoreRequest) []proto.Message {
	all := []proto.Message{req.Pod, &cri.RuntimeHandler{Name: handler}}
	for _, c := range req.Containers {
		all = append(all, c)
	}
	return all
}

// restoreOf is the name of a request to restore.
type restoreOf struct {
	pod           records.PodName
	dir, manifest string
}

// mayRestore refuses what can never be restored, before anything is made.
func (e *Engine) mayRestore(ctx context.Context, run podRequest, containers []*cri.ContainerConfig) error {
	if err := run.runtime.MayRestore(ctx); err != nil {
		return err
	}
	if err := checkRestorable(run.config.GetLinux().GetSecurityContext().GetNamespaceOptions()); err != nil {
		return err
	}
	for _, c := range containers {
		err := cmp.Or(checkRestorable(c.GetLinux().GetSecurityContext().GetNamespaceOptions()), checkOwnPID(c), checkApart(c))
		if err != nil {
			return fmt.Errorf("container %s: %w", c.GetMetadata().GetName(), err)
		}
	}
	return nil
}

func notRestored(what, why string) error {
	return fmt.Errorf("%s cannot be restored: %s: %w", what, why, fault.Precondition)
}

// checkRestorable refuses namespaces that criu cannot restore, or in which it would act on the node.
func checkRestorable(o *cri.NamespaceOption) error {
	switch {
	case o.GetPid() == cri.NamespaceMode_NODE:
		return notRestored("a container in the PID namespace of the node (hostPID)", "its process ids may be taken")
	case o.GetIpc() == cri.NamespaceMode_NODE:
		return notRestored("a container in the IPC namespace of the node (hostIPC)", "criu would change the objects of the node")
	case o.GetNetwork() == cri.NamespaceMode_NODE:
		return notRestored("a container in the network of the node (hostNetwork)", "criu would change the network of the node")
	case o.GetUsernsOptions() != nil && o.GetUsernsOptions().GetMode() != cri.NamespaceMode_NODE:
		return notRestored("a container in a user namespace", "criu cannot join that of the pod")
	}
	return nil
}

// checkOwnPID refuses a PID namespace that is not the container's own, of which there are no checkpoints either.
func checkOwnPID(c *cri.ContainerConfig) error {
	if o := c.GetLinux().GetSecurityContext().GetNamespaceOptions(); o.GetPid() != cri.NamespaceMode_CONTAINER {
		return notRestored("a container that shares the PID namespace of its pod or of another container (shareProcessNamespace)", "criu restores a PID namespace only with its first process")
	}
	return nil
}

// checkApart refuses what joins a container with the node: what a process has done with a device is not in its
// checkpoint, and its mounts stay its own.
func checkApart(c *cri.ContainerConfig) error {
	named, err := cdi.Devices(c)
	switch {
	case err != nil:
		return err
	case len(c.GetDevices()) > 0 || len(named) > 0:
		return notRestored("a container with devices", "their state is not in a checkpoint")
	case c.GetLinux().GetSecurityContext().GetPrivileged():
		return notRestored("a privileged container", "it has the devices of the node, whose state is not in a checkpoint")
	}
	for _, m := range c.GetMounts() {
		if m.GetPropagation() == cri.MountPropagation_PROPAGATION_BIDIRECTIONAL {
			return notRestored("a container with bidirectional mounts", "what it mounts would not reach the node")
		}
	}
	return nil
}

func (e *Engine) restoreSandbox(ctx context.Context, run podRequest, req RestoreRequest) (_ string, err error) {
	var source *checkpoint.Source
	err = trace.Do(ctx, "read checkpoint", func(context.Context) error {
		keys, err := checkpoint.TrustedKeys(e.cfg.StateDir, e.policy().RestoreKeys)
		if err == nil {
			source, err = checkpoint.OpenSource(req.Dir, keys)
		}
		return err
	})
	if err != nil {
		return "", err
	}
	defer source.Close()
	if req.Manifest != "" && req.Manifest != source.SHA256 {
		return "", fmt.Errorf("%s is not the checkpoint that the request was made for, somebody has replaced it meanwhile: %w", req.Dir, fault.Precondition)
	}
	origins, err := originsOf(source, run.handler, req.Containers)
	if err == nil {
		err = e.checkRoomFor(source)
	}
	if err != nil {
		return "", err
	}
	id, name := ids.New(e.mark), records.NameOfPod(req.Pod.GetMetadata())
	if owner, ok := e.sandboxes.Reserve(name, id); !ok {
		return "", podExists(name, owner)
	}
	if err := e.runReserved(ctx, id, run); err != nil {
		return "", err
	}
	err = e.restoreInto(ctx, id, source, req, origins)
	if err != nil {
		ctx, cancel := undoContext(ctx)
		defer cancel()
		if undo := e.RemoveSandbox(ctx, id); undo != nil {
			return "", errors.Join(err, fmt.Errorf("remove the pod again: %w", undo))
		}
		return "", err
	}
	e.counters.restored.Add(source.Size())
	slog.InfoContext(ctx, "pod restored", "pod", id, "path", req.Dir, "key", source.Key, "checkpointed", source.Manifest.CheckpointedAt)
	return id, nil
}

// checkRoomFor refuses a checkpoint whose files do not fit below root, where they are copied.
func (e *Engine) checkRoomFor(source *checkpoint.Source) error {
	room, err := checkpoint.RoomIn(e.cfg.StateDir)
	if err != nil {
		return err
	}
	return checkpoint.CheckRoom(source.Size(), room)
}

// origin is the part of a checkpoint from which a container is restored.
type origin struct {
	source *checkpoint.Source
	part   checkpoint.PodPart
}

// originsOf finds the part of each container. All parts must be asked for.
func originsOf(source *checkpoint.Source, handler string, containers []*cri.ContainerConfig) ([]*origin, error) {
	m := &source.Manifest
	if m.Handler != handler {
		return nil, fmt.Errorf("the checkpoint is of the handler %q and the request of %q: %w", m.Handler, handler, fault.Precondition)
	}
	var origins []*origin
	for _, c := range containers {
		part, ok := source.Part(c.GetMetadata().GetName())
		if !ok {
			return nil, fmt.Errorf("container %q is not in the checkpoint: %w", c.GetMetadata().GetName(), fault.Invalid)
		}
		origins = append(origins, &origin{source, part})
	}
	if len(origins) != len(m.Containers) {
		return nil, fmt.Errorf("the checkpoint has %d containers and the request has %d: %w", len(m.Containers), len(origins), fault.Invalid)
	}
	return origins, nil
}

// restoreInto restores the containers in a new pod.
func (e *Engine) restoreInto(ctx context.Context, id string, source *checkpoint.Source, req RestoreRequest, origins []*origin) error {
	s, err := e.sandboxes.Find(id)
	if err != nil {
		return err
	}
	if source.Manifest.SharedMemory != "" {
		restore := func(ctx context.Context) error { return s.restoreShm(ctx, source) }
		if err := trace.Do(ctx, "restore shared memory", restore); err != nil {
			return fmt.Errorf("restore /dev/shm of the pod: %w", err)
		}
	}
	var restored []string
	for i, cfg := range req.Containers {
		err := trace.Long(ctx, "restore container", func(ctx context.Context) error {
			id, err := e.createIn(ctx, s, cfg, sources{privilegedPod: privileged(req.Pod), checkpoint: origins[i]})
			restored = append(restored, id)
			return err
		})
		if err != nil {
			return err
		}
	}
	if err := trace.Call(ctx, "set hostname", s.resetHostname); err != nil {
		return err
	}
	if err := e.checkCreated(restored); err != nil {
		return err
	}
	s.Change(func(now *livePod) { now.Restoring = false })
	return s.Put(ctx)
}

// checkCreated refuses a pod of which a container has been stopped or removed, or has ended, while the others were
// restored.
func (e *Engine) checkCreated(containers []string) error {
	for _, id := range containers {
		v, err := e.Container(id)
		switch {
		case errors.Is(err, fault.NotFound):
			return fmt.Errorf("container %s was removed while its pod was being restored: %w", id, fault.Precondition)
		case err != nil:
			return err
		case v.State != cri.ContainerState_CONTAINER_CREATED:
			return fmt.Errorf("container %s was stopped or has ended while its pod was being restored: %w", id, fault.Precondition)
		}
	}
	return nil
}

// resetHostname gives the pod the hostname of its request: criu has given it that of the checkpoint.
func (s *Sandbox) resetHostname() (err error) {
	spec := s.plan.Namespaces
	if spec.Hostname, err = s.plan.Hostname(); err != nil {
		return err
	}
	return ns.ResetUTS(spec)
}

// restoreShm fills the pod's /dev/shm. The archive is copied first, to be applied only if it is what was signed
// for; the copy goes with the record of the pod.
func (s *Sandbox) restoreShm(ctx context.Context, source *checkpoint.Source) (err error) {
	file := filepath.Join(s.engine.records.Pods.Path(s.ID), checkpoint.Shm)
	defer func() { err = errors.Join(err, os.RemoveAll(file)) }()
	if err := source.FetchShm(ctx, file); err != nil {
		return err
	}
	f, err := regular.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	return checkpoint.Apply(ctx, f, checkpoint.Changes{}, s.files.Shm())
}

// fits refuses a plan with another image than that of the checkpoint, whose files the processes have open.
func (o *origin) fits(plan *records.ContainerPlan) error {
	if o == nil || o.part.ImageID == plan.ImageID {
		return nil
	}
	return fmt.Errorf("the checkpoint is of the image %s and the request is for %s: %w", o.part.ImageID, plan.ImageID, fault.Precondition)
}

// restore has the runtime restore the container from a copy of the part, which it does not need any longer than that.
func (c *Container) restore(ctx context.Context, ociSpec *nri.Spec, io oci.IO, o *origin) (task oci.Task, err error) {
	var part checkpoint.Part
	fetch := func(ctx context.Context) (err error) {
		part, err = o.source.Fetch(ctx, o.part, c.restoreDir())
		return err
	}
	if err := trace.Do(ctx, "copy checkpoint", fetch); err != nil {
		return nil, err
	}
	apply := func(ctx context.Context) error { return part.ApplyLayer(ctx, c.ref.Rootfs()) }
	if err := trace.Do(ctx, "restore writable layer", apply); err != nil {
		return nil, fmt.Errorf("restore writable layer: %w", err)
	}
	dumped, err := part.Spec()
	if err != nil {
		return nil, err
	}
	err = trace.Do(ctx, "restore processes", func(ctx context.Context) (err error) {
		task, err = c.runtime.Restore(ctx, c.ref, ociSpec, io, oci.Restored{Spec: dumped, Images: part.Images()})
		return err
	})
	if err != nil {
		return nil, err
	}
	remove := func() error {
		if err := mount.UnmountBelow(part.Dir); err != nil { // criu mounts cgroups in it, where only it should see them
			return err
		}
		return os.RemoveAll(part.Dir)
	}
	if err := trace.Call(ctx, "remove checkpoint files", remove); err != nil {
		slog.WarnContext(ctx, "copy of a checkpoint not removed, it goes with the container", "container", c.ID, "path", part.Dir, "err", err)
	}
	return task, nil
}

// restoreDir is the directory for the copy of a part.
func (c *Container) restoreDir() string {
	return filepath.Join(c.engine.records.Containers.Path(c.ID), "restore")
}
