package pod

import (
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/view"
)

// Sandbox returns the view of a pod.
func (e *Engine) Sandbox(id string) (*view.Sandbox, error) {
	s, err := e.sandboxes.Find(id)
	if err != nil {
		return nil, err
	}
	return s.View(), nil
}

// Sandboxes returns the views of all pods, in no order.
func (e *Engine) Sandboxes() []*view.Sandbox {
	return mapped(e.sandboxes.All(), func(s *Sandbox) *view.Sandbox { return s.View() })
}

// SandboxContainers returns the views of a pod's containers, newest first.
func (e *Engine) SandboxContainers(id string) ([]*view.Container, error) {
	s, err := e.sandboxes.Find(id)
	if err != nil {
		return nil, err
	}
	return s.memberViews(), nil
}

// memberViews returns the views of the pod's containers, newest first.
func (s *Sandbox) memberViews() []*view.Container {
	views := mapped(s.Now().containers, func(c *Container) *view.Container { return c.View() })
	slices.SortFunc(views, func(a, b *view.Container) int { return b.CreatedAt.Compare(a.CreatedAt) })
	return views
}

// Container returns the view of a container.
func (e *Engine) Container(id string) (*view.Container, error) {
	c, err := e.containers.Find(id)
	if err != nil {
		return nil, err
	}
	return c.View(), nil
}

// Containers returns the views of all containers, in no order.
func (e *Engine) Containers() []*view.Container {
	return mapped(e.containers.All(), func(c *Container) *view.Container { return c.View() })
}

// RuntimeSpec returns the config.json of a container's bundle, with the limits that updates have
// set since. Fields that this version does not know are not in it.
func (e *Engine) RuntimeSpec(id string) (*specs.Spec, error) {
	c, err := e.containers.Find(id)
	if err != nil {
		return nil, err
	}
	s, err := oci.ReadSpec[specs.Spec](c.ref.Dir)
	if err != nil || s.Linux == nil || s.Linux.Resources == nil {
		return s, err
	}
	if now, err := spec.Resources(c.Now().Resources.M, e.planner.Host); err == nil { // an earlier version's may be refused by now
		blueprint.Overlay(s.Linux.Resources, now)
	}
	return s, nil
}

// PodSpec returns the OCI spec of a pod: that of its infra container or, if it has none, one that
// says the same of the pod, with the namespaces that its containers join.
func (e *Engine) PodSpec(id string) (*specs.Spec, error) {
	s, err := e.sandboxes.Find(id)
	if err != nil {
		return nil, err
	}
	if s.plan.Infra {
		return oci.ReadSpec[specs.Spec](s.infraRef().Dir)
	}
	pod := &specs.Spec{
		Version: specs.Version, Hostname: s.plan.Config.M.GetHostname(), Annotations: s.plan.Config.M.GetAnnotations(),
		Linux: &specs.Linux{CgroupsPath: s.plan.Config.M.GetLinux().GetCgroupParent()},
	}
	if s.View().State != cri.PodSandboxState_SANDBOX_READY {
		return pod, nil // the namespaces are gone
	}
	paths := s.plan.Namespaces.Paths()
	for _, n := range []specs.LinuxNamespace{
		{Type: specs.NetworkNamespace, Path: paths.Net}, {Type: specs.IPCNamespace, Path: paths.IPC},
		{Type: specs.UTSNamespace, Path: paths.UTS}, {Type: specs.UserNamespace, Path: paths.User},
	} {
		if n.Path != "" {
			pod.Linux.Namespaces = append(pod.Linux.Namespaces, n)
		}
	}
	return pod, nil
}

// mapped applies f to each element.
func mapped[T, V any](all []T, f func(T) V) []V {
	made := make([]V, len(all))
	for i, one := range all {
		made[i] = f(one)
	}
	return made
}
