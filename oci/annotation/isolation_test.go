package annotation

import (
	"errors"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

// A pod that CRI-O would have run in a user namespace does not run as root of the node instead.
func TestPodWithoutItsUserNamespaceIsRefused(t *testing.T) {
	t.Parallel()
	const old, newer = "io.kubernetes.cri-o.userns-mode", "userns-mode.crio.io"
	for _, c := range []struct {
		key, mode string
		rules     Rules
		refused   bool
	}{
		{old, "auto:size=65536", Rules{Allowed: []string{old}}, true},
		{newer, "private", Rules{Allowed: []string{old}}, true},
		{old, "auto", Rules{Allowed: []string{newer}}, true},
		{old, "auto", Rules{Allowed: []string{"io.kubernetes.cri-o.*"}}, true},
		{old, "auto", Rules{Workloads: map[string]Workload{"w": {Activation: "on", Allowed: []string{old}}}}, true},
		{old, "auto", Rules{Allowed: []string{old}, UserNamespace: true}, false},
		{old, "auto", Rules{Allowed: []string{"devices.crio.io"}}, false}, // nor does CRI-O act on it
		{old, "host", Rules{Allowed: []string{old}}, false},
		{old, "", Rules{Allowed: []string{old}}, false},
	} {
		_, err := Read(map[string]string{c.key: c.mode, "on": ""}, c.rules)
		if refused := errors.Is(err, fault.Denied); refused != c.refused || refused && !strings.Contains(err.Error(), c.key+": ") {
			t.Errorf("%s=%s with %+v: %v", c.key, c.mode, c.rules, err)
		}
	}
}
