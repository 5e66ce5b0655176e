package integration

import (
	"encoding/binary"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/tools"
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

// A program with a capability of its own file has it as an ordinary user, also without new privileges, if the
// container has it: so do ingress controllers listen at port 80.
func TestCapabilitiesOfFiles_moby_45491_gvisor_14878(t *testing.T) {
	t.Parallel()
	w := shared(t)
	path, err := tools.Probe(t.Context())
	must(t, err)
	program, err := image.HostFile("able", path, 0o755)
	must(t, err)
	const revision2, effective = 0x02000000, 1
	attribute := binary.LittleEndian.AppendUint32(nil, revision2|effective)
	attribute = binary.LittleEndian.AppendUint32(attribute, 1<<unix.CAP_NET_BIND_SERVICE)
	program.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": string(append(attribute, make([]byte, 12)...))}
	ref := w.image(t, nil, program)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		for name, c := range map[string]struct {
			caps *cri.Capability
			want uint64
		}{
			"by default": {nil, defaultCapabilities},
			"alone":      {&cri.Capability{DropCapabilities: []string{"ALL"}, AddCapabilities: []string{"NET_BIND_SERVICE"}}, capSet(unix.CAP_NET_BIND_SERVICE)},
		} {
			for _, noNew := range []bool{false, true} {
				f := p.facts(t, func(config *cri.ContainerConfig) {
					config.Image.Image = ref
					config.Command = []string{"/able"}
					config.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1001}
					config.Linux.SecurityContext.NoNewPrivs = noNew
					config.Linux.SecurityContext.Capabilities = c.caps
				})
				equal(t, name+": no new privileges", f.NoNewPrivs, noNew)
				equal(t, name+": effective", f.Caps.Effective, capSet(unix.CAP_NET_BIND_SERVICE))
				equal(t, name+": bounding", f.Caps.Bounding, c.want)
			}
		}
	})
}

func TestUnknownCapabilitiesAreRefused_crio_1707_pv_migrate_165(t *testing.T) {
	t.Parallel()
	p := shared(t).run(t, "crun")
	for _, name := range []string{"CAP_CAP_SYS_CHROOT", "CAP_OF_TOMORROW", "SYS_ADMIN ", ""} {
		for _, caps := range []*cri.Capability{{AddCapabilities: []string{name}}, {DropCapabilities: []string{name}}, {AddAmbientCapabilities: []string{name}}} {
			_, err := p.try(t.Context(), steps("sleep"), func(c *cri.ContainerConfig) { c.Linux.SecurityContext.Capabilities = caps })
			wantCode(t, err, codes.InvalidArgument, strconv.Quote(name))
		}
	}
}
