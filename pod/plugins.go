package pod

import (
	"context"
	"log/slog"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/cdi"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/records"
)

// This file describes pods and containers to NRI plugins. Plugins are asked before the
// record says that a pod is ready or a container created, so that a refusal is undone
// like any other failure.

// askPluginsForUpdate asks plugins whether the pod may get these resources.
func (s *Sandbox) askPluginsForUpdate(ctx context.Context, overhead, resources *cri.LinuxContainerResources) error {
	o, err := spec.Resources(overhead, s.engine.planner().Host)
	if err != nil {
		return err
	}
	r, err := spec.Resources(resources, s.engine.planner().Host)
	if err != nil {
		return err
	}
	return s.engine.deps.Plugins.UpdatePod(ctx, s.describe, o, r)
}

// askPlugins lets plugins adjust the spec.
func (c *Container) askPlugins(ctx context.Context, s *nri.Spec) error {
	described := &nri.Container{} // that the plugins, if there are any, adjust
	set, err := c.nri.Create(ctx, func() *nri.Container {
		described = c.describeWith(s)
		return described
	})
	if err != nil {
		return err
	}
	if score := s.Process.OOMScoreAdj; score != nil {
		*score = spec.OOMScoreAdj(int64(*score), c.engine.planner().Host)
	}
	limits := spec.Report(c.Now().Resources.M, set)
	c.Change(func(now *liveContainer) { now.Resources.M, now.Annotations = limits, described.Annotations })
	return blueprint.EnoughMemory(c.runtime.Handler(), c.plan.Handler, limits)
}

// describe returns the pod as plugins see it.
func (s *Sandbox) describe() *nri.Pod {
	now := s.Now()
	cfg := records.Pod{PodPlan: s.plan, PodState: now.PodState}.Current()
	p := &nri.Pod{ID: s.ID, Handler: s.plan.Handler, Config: cfg}
	// Invalid limits have been refused in the request.
	p.Overhead, _ = spec.Resources(cfg.GetLinux().GetOverhead(), s.engine.planner().Host)
	p.Resources, _ = spec.Resources(cfg.GetLinux().GetResources(), s.engine.planner().Host)
	if now.infra != nil {
		p.PID = now.infra.PID()
	}
	p.IPs = now.IPs
	if now.Network != nil {
		p.IPs = now.Network.IPs
	}
	paths := s.plan.Namespaces.Paths()
	for _, n := range []nri.Namespace{
		{Type: "network", Path: paths.Net}, {Type: "ipc", Path: paths.IPC},
		{Type: "uts", Path: paths.UTS}, {Type: "user", Path: paths.User},
	} {
		if n.Path != "" && (now.Phase == records.Ready || pinned(n.Path)) {
			p.Namespaces = append(p.Namespaces, n)
		}
	}
	return p
}

// pinned reports whether a namespace is still there.
func pinned(path string) bool {
	_, err := ns.Inode(path)
	return err == nil
}

// describe returns the container as plugins see it, with the spec of its bundle.
func (c *Container) describe() *nri.Container {
	s, err := oci.ReadSpec[nri.Spec](c.ref.Dir)
	if err != nil {
		slog.Warn("cannot read the spec of a container for NRI plugins", "container", c.ID, "err", err)
	}
	return c.describeWith(s)
}

func (c *Container) describeWith(s *nri.Spec) *nri.Container {
	now := c.Now()
	now.abandoned = nil // plugins are told of the start, whoever waits for it
	d := &nri.Container{
		ID: c.ID, Pod: c.sandbox.describe(), Config: c.plan.Config.M, Annotations: now.Annotations, Spec: s,
		State:     cri.ContainerState_CONTAINER_UNKNOWN, // not created yet
		CreatedAt: c.plan.CreatedAt, ImageID: c.plan.ImageID,
	}
	_, d.ImageDigest, _ = strings.Cut(c.plan.ImageRef, "@")
	d.CDIDevices, _ = cdi.Devices(c.plan.Config.M)
	if now.task != nil {
		v := c.show(&now)
		d.State, d.PID, d.StartedAt, d.FinishedAt = v.State, v.PID, v.StartedAt, v.FinishedAt
		d.ExitCode, d.Reason, d.Message = v.ExitCode, v.Reason, v.Message
	}
	return d
}

// PluginNode lets NRI plugins observe and change an engine.
type PluginNode struct{ Engine *Engine }

// Pods implements nri.Node.
func (n PluginNode) Pods() []*nri.Pod {
	var pods []*nri.Pod
	for _, s := range n.Engine.sandboxes.All() {
		if s.Now().Phase != records.Removing {
			pods = append(pods, s.describe())
		}
	}
	return pods
}

// Containers implements nri.Node.
func (n PluginNode) Containers() []*nri.Container {
	var containers []*nri.Container
	for _, c := range n.Engine.containers.All() {
		if state := c.View().State; state == cri.ContainerState_CONTAINER_CREATED || state == cri.ContainerState_CONTAINER_RUNNING {
			containers = append(containers, c.describe())
		}
	}
	return containers
}

// UpdateContainer implements nri.Node.
func (n PluginNode) UpdateContainer(ctx context.Context, id string, change nri.Change) error {
	c, err := n.Engine.containers.Find(id)
	if err != nil {
		return err
	}
	return c.changeResources(ctx, nil, change)
}

// InjectDevices implements nri.Node.
func (n PluginNode) InjectDevices(s *nri.Spec, names []string) error {
	return cdi.Inject(s, n.Engine.policy().CDISpecDirs, names)
}

// BlockIOClass implements nri.Node.
func (n PluginNode) BlockIOClass(class string) (*nri.BlockIO, error) {
	return n.Engine.classes.BlockIO(class)
}

// RDTClass implements nri.Node.
func (n PluginNode) RDTClass(class string) (*nri.RDT, error) {
	return n.Engine.classes.RDT(class)
}
