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
			return mapped(e.sandboxes.All(), func(s *Sandbox) usage.Sandbox {
				containers := func() []usage.Container { return mapped(s.Now().containers, (*Container).measured) }
				return usage.Sandbox{View: s.View(), Meter: s.meter, Cgroup: s.cgroup, Containers: containers}
			})
		},
		Containers: func() []usage.Container { return mapped(e.containers.All(), (*Container).measured) },
	}
}

func (c *Container) measured() usage.Container {
	m := usage.Container{View: c.View(), Meter: c.meter}
	if c.sandbox.plan.Sandboxed {
		m.Task = c.Now().task
	}
	return m
}
