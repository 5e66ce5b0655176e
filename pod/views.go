package pod

import (
	"encoding/json"
	"slices"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/view"
)

// Sandbox returns the view of a pod. A pod that has lost a namespace is not ready in it.
func (e *Engine) Sandbox(id string) (*view.Sandbox, error) {
	s, err := e.sandboxes.Find(id)
	if err != nil {
		return nil, err
	}
	_ = s.checkAlive() // the view shows it
	return s.View(), nil
}

// Sandboxes returns the views of all pods, in no order. A pod that has lost a namespace is not
// ready in them.
func (e *Engine) Sandboxes() []*view.Sandbox {
	all := e.sandboxes.All()
	e.pins.check(all)
	return mapped(all, func(s *Sandbox) *view.Sandbox { return s.View() })
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
// set since.
func (e *Engine) RuntimeSpec(id string) (json.RawMessage, error) {
	c, err := e.containers.Find(id)
	if err != nil {
		return nil, err
	}
	text, err := oci.ReadSpec[json.RawMessage](c.ref.Dir)
	if err != nil {
		return nil, err
	}
	return spec.WithLimits(*text, c.Now().Resources.M, e.planner().Host), nil
}

// PodSpec returns the OCI spec of a pod: the config.json of its infra container or, if it has
// none, one that says the same of the pod.
func (e *Engine) PodSpec(id string) (json.RawMessage, error) {
	s, err := e.sandboxes.Find(id)
	if err != nil {
		return nil, err
	}
	if s.plan.Infra {
		text, err := oci.ReadSpec[json.RawMessage](s.infraRef().Dir)
		if err != nil {
			return nil, err
		}
		return *text, nil
	}
	var namespaces spec.Namespaces
	if s.View().State == cri.PodSandboxState_SANDBOX_READY { // else they are gone
		paths := s.plan.Namespaces.Paths()
		namespaces = spec.Namespaces{Net: paths.Net, IPC: paths.IPC, UTS: paths.UTS, User: paths.User}
	}
	return spec.OfPod(s.plan.Config.M, namespaces)
}

// mapped applies f to each element.
func mapped[T, V any](all []T, f func(T) V) []V {
	made := make([]V, len(all))
	for i, one := range all {
		made[i] = f(one)
	}
	return made
}
