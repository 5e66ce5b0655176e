package integration

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// defaultCapabilities are those in crius's configuration reference.
var defaultCapabilities = capSet(unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FSETID, unix.CAP_FOWNER,
	unix.CAP_SETGID, unix.CAP_SETUID, unix.CAP_SETPCAP, unix.CAP_NET_BIND_SERVICE, unix.CAP_KILL)

func capSet(caps ...int) uint64 {
	var set uint64
	for _, c := range caps {
		set |= 1 << c
	}
	return set
}

// ownBounding is the maximum that this machine can grant.
func ownBounding(t *testing.T) uint64 {
	t.Helper()
	data, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), "CapBnd:\t")
	set, err := strconv.ParseUint(strings.Fields(rest)[0], 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

func TestCapabilities_CVE_2022_24769_CVE_2022_27652(t *testing.T) {
	t.Parallel()
	w := shared(t)
	all := ownBounding(t)
	cases := map[string]struct {
		caps *cri.Capability
		want uint64
	}{
		"default":         {nil, defaultCapabilities},
		"add":             {&cri.Capability{AddCapabilities: []string{"NET_ADMIN", "CAP_SYS_TIME"}}, defaultCapabilities | capSet(unix.CAP_NET_ADMIN, unix.CAP_SYS_TIME)},
		"lower case":      {&cri.Capability{AddCapabilities: []string{"net_admin"}}, defaultCapabilities | capSet(unix.CAP_NET_ADMIN)},
		"drop":            {&cri.Capability{DropCapabilities: []string{"CHOWN", "KILL"}}, defaultCapabilities &^ capSet(unix.CAP_CHOWN, unix.CAP_KILL)},
		"drop all":        {&cri.Capability{DropCapabilities: []string{"ALL"}}, 0},
		"drop all but":    {&cri.Capability{AddCapabilities: []string{"CHOWN"}, DropCapabilities: []string{"ALL"}}, capSet(unix.CAP_CHOWN)},
		"add all":         {&cri.Capability{AddCapabilities: []string{"ALL"}}, all},
		"add all but":     {&cri.Capability{AddCapabilities: []string{"ALL"}, DropCapabilities: []string{"SYS_ADMIN"}}, all &^ capSet(unix.CAP_SYS_ADMIN)},
		"add and drop it": {&cri.Capability{AddCapabilities: []string{"NET_ADMIN"}, DropCapabilities: []string{"NET_ADMIN"}}, defaultCapabilities},
	}
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for name, c := range cases {
			f := p.facts(t, func(config *cri.ContainerConfig) { config.Linux.SecurityContext.Capabilities = c.caps })
			equal(t, name+": effective", f.Caps.Effective, c.want)
			equal(t, name+": permitted", f.Caps.Permitted, c.want)
			equal(t, name+": bounding", f.Caps.Bounding, c.want)
			equal(t, name+": inheritable (CVE-2022-27652)", f.Caps.Inheritable, 0)
			equal(t, name+": ambient", f.Caps.Ambient, 0)
		}
	})
}

func TestCapabilitiesOfAUser_CVE_2018_1000400(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		as := func(caps *cri.Capability) containerChange {
			return func(c *cri.ContainerConfig) {
				c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1001}
				c.Linux.SecurityContext.Capabilities = caps
			}
		}
		f := p.facts(t, as(nil))
		equal(t, "effective (CVE-2018-1000400)", f.Caps.Effective, 0)
		equal(t, "permitted", f.Caps.Permitted, 0)
		equal(t, "ambient", f.Caps.Ambient, 0)
		equal(t, "bounding", f.Caps.Bounding, defaultCapabilities)

		f = p.facts(t, as(&cri.Capability{AddAmbientCapabilities: []string{"NET_BIND_SERVICE"}}))
		equal(t, "effective with an ambient one", f.Caps.Effective, capSet(unix.CAP_NET_BIND_SERVICE))
		equal(t, "ambient with an ambient one", f.Caps.Ambient, capSet(unix.CAP_NET_BIND_SERVICE))
	})
}

func TestExecHasTheContainersCapabilities_CVE_2022_27650_CVE_2022_29162(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep", func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.Capabilities = &cri.Capability{DropCapabilities: []string{"KILL"}}
			c.Linux.SecurityContext.NoNewPrivs = true
		})
		f := c.facts(t)
		equal(t, "effective", f.Caps.Effective, defaultCapabilities&^capSet(unix.CAP_KILL))
		equal(t, "inheritable", f.Caps.Inheritable, 0)
		equal(t, "no new privileges", f.NoNewPrivs, true)
		equal(t, "seccomp", f.Seccomp, 2)
	})
}
