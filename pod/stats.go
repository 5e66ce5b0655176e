package pod

import (
	"github.com/crius-run/crius/pod/usage"
)

// Usage measures the pods and containers of the engine.
func (e *Engine) Usage() *usage.Reader {
	return &usage.Reader{
		Images: e.deps.Images,
		Meters: e.meters,
		Sandboxes: func() []usage.Sandbox {
			all := e.sandboxes.All()
			measured := make([]usage.Sandbox, len(all))
			for i, s := range all {
				containers := func() []usage.Container { return measuredContainers(s.now().containers) }
				measured[i] = usage.Sandbox{View: s.view.Load(), Meter: s.meter, Cgroup: s.cgroup, Containers: containers}
			}
			return measured
		},
		Containers: func() []usage.Container { return measuredContainers(e.containers.All()) },
	}
}

func measuredContainers(all []*Container) []usage.Container {
	measured := make([]usage.Container, len(all))
	for i, c := range all {
		measured[i] = usage.Container{View: c.view.Load(), Meter: c.meter}
		if c.sandbox.plan.Sandboxed {
			measured[i].Task = c.now().task
		}
	}
	return measured
}
