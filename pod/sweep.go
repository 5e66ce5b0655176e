package pod

import (
	"context"
	"errors"

	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// sweep removes everything with an id that has no record, of a container or a pod, whose network
// reclaim releases.
func (e *Engine) sweep(ctx context.Context, id string, reclaim func(context.Context) error) error {
	return errors.Join(e.sweepContainer(ctx, id), e.sweepSandbox(ctx, id, reclaim))
}

// deleteFromAny deletes a container whose handler is unknown, since it has no record: it asks
// all runtimes.
func (e *Engine) deleteFromAny(ctx context.Context, ref oci.Ref) error {
	var errs []error
	for _, runtime := range e.deps.Runtimes.All() {
		errs = append(errs, trace.Do(ctx, "delete container", func(ctx context.Context) error { return runtime.Delete(ctx, ref) }))
	}
	return errors.Join(errs...)
}

// sweepContainer removes what a container without a record left in the run directory.
func (e *Engine) sweepContainer(ctx context.Context, id string) error {
	ref := e.containerRef(id, records.ContainerPlan{})
	errs := []error{e.deleteFromAny(ctx, ref)}
	if group, err := oci.DumpCgroup(id); err == nil {
		errs = append(errs, trace.Do(ctx, "abandon checkpoint", func(ctx context.Context) error { return oci.EndDump(ctx, group) }))
	}
	rootfs := storage.Rootfs{ID: id, Dir: e.records.Containers.Path(id), Target: ref.Rootfs()}
	removeRoot := func(ctx context.Context) error {
		return errors.Join(e.deps.Images.RemoveRootfs(ctx, rootfs), mount.UnmountBelow(ref.Dir))
	}
	if err := trace.Do(ctx, "remove root file system", removeRoot); err != nil {
		return errors.Join(append(errs, err)...)
	}
	errs = append(errs, removeRunDir(ctx, ref.Dir))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return e.records.Containers.Delete(ctx, id)
}

// sweepSandbox is sweepContainer for a pod. If reclaim fails, what it needs for the next try stays.
func (e *Engine) sweepSandbox(ctx context.Context, id string, reclaim func(context.Context) error) error {
	plan := records.PodPlan{OwnFiles: true, Namespaces: ns.Spec{Dir: e.cfg.NamespacesDir, Name: blueprint.PinPrefix + id}}
	s := &Sandbox{podObject: podObject{ID: id}, engine: e, plan: plan, files: e.cfg.filesOf(id, &plan)}
	errs := []error{e.deleteFromAny(ctx, s.infraRef())}
	if err := trace.Do(ctx, "detach network", reclaim); err != nil {
		errs = append(errs, err)
	} else {
		errs = append(errs, s.removeNamespaces(ctx))
	}
	errs = append(errs, s.unmount(ctx))
	if err := mount.UnmountBelow(s.files.Dir); err != nil {
		return errors.Join(append(errs, err)...) // nothing must be deleted through a mount
	}
	errs = append(errs, removeRunDir(ctx, s.files.Dir))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return e.records.Pods.Delete(ctx, id)
}
