package oci

import (
	"errors"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/criu"
)

// No options of criu but crius's own are used, even for a container of an earlier crius.
func TestCriuOptionsAreOurs(t *testing.T) {
	t.Parallel()
	ref := Ref{Dir: "/run/crius/containers/c1"}
	for _, annotations := range []map[string]string{nil, {"a": "b"}, {criu.Annotation: "/etc/evil"}, {criu.Annotation: ""}} {
		spec := &specs.Spec{Annotations: annotations}
		if err := checkCriuOptions(ref, spec); !errors.Is(err, fault.Precondition) {
			t.Errorf("%q: %v", annotations, err)
		}
		setCriuOptions(ref, spec)
		if err := checkCriuOptions(ref, spec); err != nil {
			t.Errorf("%q: %v", annotations, err)
		}
	}
}

func TestCheckpointNeedsOwnPIDNamespace(t *testing.T) {
	t.Parallel()
	of := func(kind specs.LinuxNamespaceType, path string) specs.LinuxNamespace {
		return specs.LinuxNamespace{Type: kind, Path: path}
	}
	for _, c := range []struct {
		namespaces []specs.LinuxNamespace
		fits       bool
	}{
		{[]specs.LinuxNamespace{of(specs.IPCNamespace, "/ns/ipc"), of(specs.PIDNamespace, "")}, true},
		{[]specs.LinuxNamespace{of(specs.PIDNamespace, "/proc/1/fd/3")}, false},
		{[]specs.LinuxNamespace{of(specs.IPCNamespace, "")}, false},
	} {
		if err := checkPIDNamespace(c.namespaces); (err == nil) != c.fits || err != nil && !errors.Is(err, fault.Precondition) {
			t.Errorf("%v: %v", c.namespaces, err)
		}
	}
}
