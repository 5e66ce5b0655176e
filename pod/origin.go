package pod

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/records"
)

// noteOrigin records how the handler is configured now for a pod of a crius that did not record
// it, so that later changes do not concern the pod. The root may be another one since.
func (r *recovery) noteOrigin(ctx context.Context, s *Sandbox) {
	if phase := s.Now().Phase; phase == records.Creating || phase == records.Removing {
		return
	}
	configured, known := r.origins[s.plan.Handler]
	if !known {
		if abilities, err := s.runtime.Probe(ctx); err == nil {
			configured = oci.OriginOf(s.runtime.Handler(), abilities)
		}
		r.origins[s.plan.Handler] = configured
	}
	if configured == nil {
		return
	}
	origin := *configured
	var found bool
	if origin.Handler.Root, found = r.rootOf(s, origin.Handler); !found {
		slog.ErrorContext(ctx, "runtime's state of a pod not found, set the root of the handler back to what it was when the pod was made",
			"pod", s.ID, "handler", s.plan.Handler, "root", configured.Handler.Root)
		return
	}
	runtime, err := r.engine.runtimeOf(s.plan.Handler, &origin)
	if err == nil {
		s.runtime, s.plan.Origin = runtime, &origin
		err = s.Put(ctx)
	}
	if err != nil {
		slog.WarnContext(ctx, "cannot record how a pod's handler is configured", "pod", s.ID, "err", err)
	}
}

// rootOf returns where the runtime keeps its state of a pod's containers: the root of the handler or,
// if nothing of them is there, the default one. found is false if a container has its state elsewhere.
func (r *recovery) rootOf(s *Sandbox, handler oci.Handler) (root string, found bool) {
	if handler.Type == "shim" || s.plan.BootID != r.engine.planner().Boot { // has its own places; has no state any more
		return handler.Root, true
	}
	var alive, all []string
	for id, rec := range r.recorded {
		if rec.SandboxID != s.ID {
			continue
		}
		all = append(all, id)
		_, err := os.Lstat(filepath.Join(r.engine.records.Containers.Path(id), "exit.json"))
		if rec.Phase == records.Started && err != nil {
			alive = append(alive, id)
		}
	}
	if s.plan.Infra {
		all = append(all, s.infraRef().ID)
	}
	for _, root := range []string{handler.Root, oci.DefaultRoot(r.engine.cfg.RunDir, s.plan.Handler)} {
		files, err := oci.StateFilesIn(root)
		if err != nil || slices.ContainsFunc(all, func(id string) bool { return len(files[id]) > 0 }) {
			return root, true
		}
	}
	return handler.Root, len(alive) == 0
}
