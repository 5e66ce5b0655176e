package pod

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/records"
)

// RunSandbox runs a pod and returns its id. A repeated call with the same request joins the
// work, or returns the pod if it is running already; the same name with another request is
// fault.Exists.
func (e *Engine) RunSandbox(ctx context.Context, handler string, cfg *cri.PodSandboxConfig) (string, error) {
	req, err := e.podRequest(ctx, handler, cfg)
	if err != nil {
		return "", err
	}
	name := records.NameOfPod(cfg.GetMetadata())
	key, err := requestOfPod(req.handler, cfg)
	if err != nil {
		return "", err
	}
	return e.creates.Do(ctx, key, func(ctx context.Context) (string, error) {
		id := ids.New(e.mark)
		if owner, ok := e.sandboxes.Reserve(name, id); !ok {
			s, err := e.sandboxes.Find(owner)
			if err != nil {
				return "", beingCreated("pod", name, owner)
			}
			if s.View().State == cri.PodSandboxState_SANDBOX_READY &&
				s.plan.Handler == req.handler && proto.Equal(canonicalPod(s.plan.Config.M), canonicalPod(cfg)) { // the original request, without updates
				return owner, nil // a retry
			}
			return "", podExists(name, owner)
		}
		if err := e.runReserved(ctx, id, req); err != nil {
			return "", err
		}
		return id, nil
	})
}

func podExists(name records.PodName, owner string) error {
	return fmt.Errorf("pod %s already exists as %s; remove it or raise metadata.attempt: %w", name, owner, fault.Exists)
}

// podRequest is a request for a pod that may succeed.
type podRequest struct {
	handler   string
	byDefault bool
	config    *cri.PodSandboxConfig
	runtime   oci.Runtime
	abilities *oci.Abilities
	restoring bool // its containers come from a checkpoint
}

// podRequest refuses what can never succeed, before anything is made.
func (e *Engine) podRequest(ctx context.Context, handler string, cfg *cri.PodSandboxConfig) (podRequest, error) {
	byDefault := handler == ""
	if byDefault {
		handler = e.deps.Runtimes.Default()
	}
	runtime, abilities, err := e.status.Runtime(ctx, handler)
	if err != nil {
		return podRequest{}, err
	}
	if err := e.validatePod(cfg); err != nil {
		return podRequest{}, err
	}
	// Like a localhost profile, it is for the infra container, which runs under the default one.
	if _, err := e.pulledProfile(ctx, cfg.GetLinux().GetSecurityContext().GetSeccomp(), cfg); err != nil {
		return podRequest{}, err
	}
	if e.planner().Namespaces("", cfg).UIDs != nil {
		if err := e.status.CanMap(handler, abilities); err != nil {
			return podRequest{}, err
		}
	}
	return podRequest{handler: handler, byDefault: byDefault, config: cfg, runtime: runtime, abilities: abilities}, nil
}

// runReserved runs a pod whose name and id are reserved.
func (e *Engine) runReserved(ctx context.Context, id string, req podRequest) error {
	started, name := time.Now(), records.NameOfPod(req.config.GetMetadata())
	err := e.deps.Trace.Do(ctx, "run pod", name.String(), func(ctx context.Context) error {
		plan := e.planner().Pod(id, blueprint.PodRequest{
			Handler: req.handler, ByDefault: req.byDefault, Config: req.config, Sandboxed: req.abilities.Sandboxed,
			Origin: oci.OriginOf(req.runtime.Handler(), req.abilities), At: e.podTime(req.config.GetMetadata()),
		})
		return e.runSandbox(ctx, id, records.Pod{PodPlan: plan, PodState: records.PodState{Phase: records.Creating, Restoring: req.restoring}})
	})
	if err != nil {
		e.sandboxes.Drop(name, id)
		return fmt.Errorf("pod %s: %w", name, err)
	}
	slog.InfoContext(ctx, "pod started", "pod", id, "name", name.String(), "handler", req.handler, "took", time.Since(started))
	return nil
}

// validatePod refuses requests that can never succeed, before anything is made.
func (e *Engine) validatePod(cfg *cri.PodSandboxConfig) error {
	if err := spec.ValidatePod(cfg); err != nil {
		return err
	}
	if err := spec.CheckPodSeccomp(cfg.GetLinux().GetSecurityContext()); err != nil {
		return err
	}
	if _, err := files.ResolvConf(cfg.GetDnsConfig()); err != nil {
		return err
	}
	if err := e.cgroups(); err != nil {
		return err
	}
	_, _, err := e.planner().Cgroup(cfg, "", "0")
	return err
}

func (e *Engine) runSandbox(ctx context.Context, id string, rec records.Pod) error {
	level, err := e.labels.Allot(id, rec.Config.M)
	if err != nil {
		return err
	}
	rec.SELinuxLevel = level
	s, err := e.newSandbox(id, rec)
	if err == nil {
		err = s.admitAsked(ctx)
	}
	if err == nil && rec.Namespaces.Net {
		err = s.planNetwork()
	}
	if err != nil {
		e.labels.Levels.Free(id)
		e.names.retire(id)
		return err
	}
	if err = s.Put(ctx); err == nil {
		err = panics.Do(ctx, "build pod", func() error { return s.build(ctx) })
	}
	if err != nil {
		ctx, cancel := undoContext(ctx)
		defer cancel()
		s.nri.Undone(ctx)
		if undo := s.teardown(ctx); undo != nil {
			slog.WarnContext(ctx, "cleanup after failed pod creation incomplete, retrying", "pod", id, "err", undo)
			e.cleanups.Add(id, s.teardown)
		}
		return err
	}
	s.Publish()
	e.sandboxes.Publish(id, s)
	s.nri.Shown()
	s.Tell()
	return nil
}

// admitAsked refuses invalid annotations, and logs those that have no effect.
func (s *Sandbox) admitAsked(ctx context.Context) error {
	asked, err := s.asked()
	if err == nil && len(asked.Ignored) > 0 {
		slog.WarnContext(ctx, "annotations have no effect: allowed_annotations of the handler does not name them, or crius does not support them",
			"pod", s.ID, "handler", s.plan.Handler, "annotations", asked.Ignored)
	}
	return err
}

// build makes everything that a pod consists of. After an error, teardown removes what it made.
func (s *Sandbox) build(ctx context.Context) error {
	var record errgroup.Group            // sync of the record to the disk
	defer func() { _ = record.Wait() }() // attach has returned its error
	if s.plan.Namespaces.Net {
		record.Go(func() error {
			return trace.Call(ctx, "sync record", s.Sync)
		})
	}
	for _, step := range []struct {
		name   string
		needed bool
		do     func(context.Context) error
	}{
		{"make pod directory", true, func(context.Context) error { return s.files.MakeDir() }},
		{"mount pod files", true, s.labelled(s.files.Mount)},
		{"write pod files", true, func(context.Context) error { return s.files.Write(&s.plan) }},
		{"mount shm", s.plan.Namespaces.IPC, s.labelled(s.mountShm)},
		{"make namespaces", true, func(context.Context) error { return makeNamespaces(s.plan.Namespaces) }},
		{"attach network", s.plan.Namespaces.Net, func(ctx context.Context) error { return s.attach(ctx, record.Wait) }},
		{"start infra container", s.plan.Infra, s.startInfra},
		{"make cgroup", s.plan.NeedsNetworkCgroup(), func(context.Context) error { return cgroup.Make(s.infraRef().Cgroup) }},
		{"call NRI plugins", true, s.nri.Run},
	} {
		if !step.needed {
			continue
		}
		if err := trace.Do(ctx, step.name, step.do); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	s.Change(func(now *livePod) { now.Phase = records.Ready })
	return s.Put(ctx)
}

// labelled wraps a step that makes files and takes their SELinux context.
func (s *Sandbox) labelled(step func(label string) error) func(context.Context) error {
	return func(context.Context) error {
		label, err := s.engine.labels.Files(&s.plan, nil)
		if err != nil {
			return err
		}
		return step(label)
	}
}

// mountShm mounts the /dev/shm of the pod's IPC namespace.
func (s *Sandbox) mountShm(label string) error {
	asked, err := s.asked()
	if err != nil {
		return err
	}
	return s.files.MountShm(cmp.Or(asked.ShmSize, s.engine.policy().ShmSize), label)
}

// makeNamespaces makes the namespaces that the containers share, and pins them, so that no
// process has to hold them.
func makeNamespaces(n ns.Spec) error {
	if !n.Net && !n.IPC && !n.UTS && len(n.UIDs) == 0 {
		return nil
	}
	_, err := ns.Create(n)
	return err
}
