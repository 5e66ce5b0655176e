package spec

import (
	"errors"
	"slices"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func TestParseCapabilities(t *testing.T) {
	for _, c := range []struct {
		names []string
		want  CapSet
	}{
		{nil, 0},
		{[]string{"CHOWN"}, 1},
		{[]string{"cap_chown", "Cap_Net_Raw", "net_raw"}, 1 | 1<<unix.CAP_NET_RAW},
		{[]string{"ALL"}, allCapabilities},
		{[]string{"CHOWN", "all"}, allCapabilities},
	} {
		if got, err := ParseCapabilities(c.names); err != nil || got != c.want {
			t.Errorf("%v: %x, %v", c.names, got, err)
		}
	}
	for _, names := range [][]string{{""}, {"CAP_"}, {"CAP_ALL"}, {"NET"}, {"ALL", "BOGUS"}, {"CAP_CAP_CHOWN"}, {"CHOWN "}} {
		if _, err := ParseCapabilities(names); !errors.Is(err, fault.Invalid) {
			t.Errorf("%v: %v", names, err)
		}
	}
}

// TestCapabilityNumbers: each name has the kernel's number.
func TestCapabilityNumbers(t *testing.T) {
	for name, number := range map[string]int{
		"CAP_CHOWN": unix.CAP_CHOWN, "CAP_KILL": unix.CAP_KILL, "CAP_SETPCAP": unix.CAP_SETPCAP,
		"CAP_NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE, "CAP_NET_RAW": unix.CAP_NET_RAW,
		"CAP_SYS_PTRACE": unix.CAP_SYS_PTRACE, "CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN, "CAP_SYS_RESOURCE": unix.CAP_SYS_RESOURCE,
		"CAP_MKNOD": unix.CAP_MKNOD, "CAP_SETFCAP": unix.CAP_SETFCAP, "CAP_SYSLOG": unix.CAP_SYSLOG,
		"CAP_AUDIT_READ": unix.CAP_AUDIT_READ, "CAP_CHECKPOINT_RESTORE": unix.CAP_LAST_CAP,
	} {
		if got := CapSet(1 << number).Names(); !slices.Equal(got, []string{name}) {
			t.Errorf("capability %d is %v, want %s", number, got, name)
		}
	}
	if len(capabilityNames) != unix.CAP_LAST_CAP+1 {
		t.Errorf("%d capabilities, the kernel has %d", len(capabilityNames), unix.CAP_LAST_CAP+1)
	}
}

func TestCapabilitySets(t *testing.T) {
	const (
		chown = CapSet(1) << unix.CAP_CHOWN
		raw   = CapSet(1) << unix.CAP_NET_RAW
		admin = CapSet(1) << unix.CAP_SYS_ADMIN
	)
	for _, c := range []struct {
		name               string
		add, drop, ambient []string
		want, wantAmbient  CapSet
	}{
		{"defaults", nil, nil, nil, chown, 0},
		{"add", []string{"NET_RAW"}, nil, nil, chown | raw, 0},
		{"drop", nil, []string{"CAP_CHOWN"}, nil, 0, 0},
		{"drop what is not there", nil, []string{"NET_RAW"}, nil, chown, 0},
		{"add all", []string{"ALL"}, nil, nil, allCapabilities, 0},
		{"add all drop one", []string{"ALL"}, []string{"SYS_ADMIN"}, nil, allCapabilities &^ admin, 0},
		{"drop all", nil, []string{"ALL"}, nil, 0, 0},
		{"drop all add one", []string{"NET_RAW"}, []string{"ALL"}, nil, raw, 0},
		{"the order in the list does not matter", []string{"NET_RAW", "all"}, []string{"SYS_ADMIN"}, nil, allCapabilities &^ admin, 0},
		{"both all", []string{"ALL", "NET_RAW"}, []string{"ALL"}, nil, raw, 0},
		{"added and dropped", []string{"NET_RAW"}, []string{"NET_RAW"}, nil, chown, 0},
		{"ambient only", nil, nil, []string{"NET_RAW"}, chown | raw, raw},
		{"ambient of few", nil, []string{"ALL"}, []string{"NET_RAW"}, raw, raw},
		{"ambient and dropped", nil, []string{"NET_RAW"}, []string{"NET_RAW"}, chown, 0},
	} {
		s := mutate(t, func(in *Input) {
			in.Defaults.Capabilities = chown
			in.Request.Container.Linux.SecurityContext.Capabilities = &cri.Capability{
				AddCapabilities: c.add, DropCapabilities: c.drop, AddAmbientCapabilities: c.ambient,
			}
		})
		sets := s.Process.Capabilities
		for set, want := range map[string]CapSet{"bounding": c.want, "permitted": c.want, "effective": c.want, "inheritable": c.wantAmbient, "ambient": c.wantAmbient} {
			got := map[string][]string{
				"bounding": sets.Bounding, "permitted": sets.Permitted, "effective": sets.Effective,
				"inheritable": sets.Inheritable, "ambient": sets.Ambient,
			}[set]
			if !slices.Equal(got, want.Names()) {
				t.Errorf("%s: %s %v, want %v", c.name, set, got, want.Names())
			}
		}
	}
	for _, names := range []*cri.Capability{
		{AddCapabilities: []string{"BOGUS"}}, {DropCapabilities: []string{"BOGUS"}}, {AddAmbientCapabilities: []string{"BOGUS"}},
	} {
		in := typical()
		in.Request.Container.Linux.SecurityContext.Capabilities = names
		if _, err := Container(in); !errors.Is(err, fault.Invalid) {
			t.Errorf("%v: %v", names, err)
		}
	}
}

// TestCapabilitiesOfTheNode: no container gets capabilities that crius lacks or
// the runtime does not know, not even a privileged one.
func TestCapabilitiesOfTheNode(t *testing.T) {
	const resource = CapSet(1) << unix.CAP_SYS_RESOURCE
	for name, change := range map[string]func(*Input){
		"privileged": privilegedPod,
		"ALL": func(in *Input) {
			in.Request.Container.Linux.SecurityContext.Capabilities = &cri.Capability{AddCapabilities: []string{"ALL"}}
		},
		"ambient": func(in *Input) {
			in.Request.Container.Linux.SecurityContext.Capabilities = &cri.Capability{AddAmbientCapabilities: []string{"ALL"}}
		},
	} {
		s := mutate(t, func(in *Input) {
			change(in)
			in.Facts.Host.Bounding = allCapabilities &^ resource
		})
		sets := s.Process.Capabilities
		if slices.Contains(sets.Bounding, "CAP_SYS_RESOURCE") || slices.Contains(sets.Ambient, "CAP_SYS_RESOURCE") || len(sets.Bounding) != len(capabilityNames)-1 {
			t.Errorf("%s: %+v", name, sets)
		}
		s = mutate(t, func(in *Input) {
			change(in)
			in.Facts.Features = &features.Features{Linux: &features.Linux{Capabilities: []string{"CAP_CHOWN", "CAP_OF_THE_FUTURE"}}}
		})
		if !slices.Equal(s.Process.Capabilities.Effective, []string{"CAP_CHOWN"}) {
			t.Errorf("%s with a runtime that knows one: %v", name, s.Process.Capabilities.Effective)
		}
	}
	s := mutate(t, func(in *Input) { in.Facts.Host.Bounding = 0 })
	if len(s.Process.Capabilities.Bounding) != 0 {
		t.Error("capabilities on a node of which nothing is known")
	}
}
