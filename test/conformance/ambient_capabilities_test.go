package main_test

import (
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images/facts"
	"github.com/crius-run/crius/test/scene"
)

func capabilities(c *cri.Capability) scene.ContainerChange {
	return func(config *cri.ContainerConfig) { config.Linux.SecurityContext.Capabilities = c }
}

// both joins two changes.
func both(a, b scene.ContainerChange) scene.ContainerChange {
	return func(c *cri.ContainerConfig) { a(c); b(c) }
}

// An ambient capability is the only kind that a process without uid 0 keeps
// over execve.
func TestAmbientCapabilities(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	app := asUser(1001, 1002)
	scene.Each(t, func(t *testing.T, handler string) {
		p := w.Pod(t, handler)
		for name, wanted := range map[string]*cri.Capability{
			"added":                  {AddAmbientCapabilities: []string{"NET_RAW"}},
			"with its prefix":        {AddAmbientCapabilities: []string{"CAP_NET_RAW"}},
			"in small letters":       {AddAmbientCapabilities: []string{"net_raw"}},
			"the only one":           {DropCapabilities: []string{"ALL"}, AddAmbientCapabilities: []string{"NET_RAW"}},
			"added in two ways":      {AddCapabilities: []string{"NET_RAW"}, AddAmbientCapabilities: []string{"NET_RAW", "NET_RAW"}},
			"beside an ordinary one": {AddCapabilities: []string{"SYS_PTRACE"}, AddAmbientCapabilities: []string{"NET_RAW"}},
		} {
			t.Run(name, func(t *testing.T) {
				c := p.Start(t, "sleep", both(app, capabilities(wanted)))
				for who, caps := range map[string]facts.Caps{"the container": procCaps(t, c), "an exec": c.Facts(t).Caps} {
					for set, mask := range map[string]uint64{
						"ambient": caps.Ambient, "effective": caps.Effective, "permitted": caps.Permitted,
						"inheritable": caps.Inheritable, "bounding": caps.Bounding,
					} {
						if !facts.Has(mask, unix.CAP_NET_RAW) {
							t.Errorf("%s: NET_RAW is not in the %s set %x", who, set, mask)
						}
					}
					scene.Equal(t, who+": ambient set", caps.Ambient, uint64(1<<unix.CAP_NET_RAW))
					scene.Equal(t, who+": effective set", caps.Effective, uint64(1<<unix.CAP_NET_RAW))
				}
			})
		}
		// Not unless requested.
		caps := p.Facts(t, both(app, capabilities(&cri.Capability{AddCapabilities: []string{"NET_RAW"}}))).Caps
		scene.Equal(t, "ambient set without asking", caps.Ambient, 0)
		scene.Equal(t, "effective set without asking", caps.Effective, 0)

		_, err := p.Try(t.Context(), "sleep", capabilities(&cri.Capability{AddAmbientCapabilities: []string{"NET_NOTHING"}}))
		scene.WantCode(t, err, codes.InvalidArgument, "NET_NOTHING")
	})
}

// With no_new_privs they stay: execve gains nothing by them.
func TestAmbientCapabilitiesWithoutNewPrivileges(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	scene.Each(t, func(t *testing.T, handler string) {
		f := w.Pod(t, handler).Facts(t, asUser(1001, 1002), capabilities(&cri.Capability{AddAmbientCapabilities: []string{"NET_RAW"}}),
			func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NoNewPrivs = true })
		scene.Equal(t, "no_new_privs", f.NoNewPrivs, true)
		scene.Equal(t, "effective set", f.Caps.Effective, uint64(1<<unix.CAP_NET_RAW))
	})
}
