package oci

import (
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/ns"
)

func TestSysfsIsHeldWhereAContainerMayWriteIt(t *testing.T) {
	t.Parallel()
	pod := ns.Spec{Dir: t.TempDir(), Name: "pod", Net: true}
	set, err := ns.Create(pod)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ns.Remove(pod); err != nil {
			t.Error(err)
		}
	})
	gone := specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: set.Net + "-gone"}
	for name, c := range map[string]struct {
		namespaces []specs.LinuxNamespace
		mount      specs.Mount
		fails      bool
	}{
		"writable":         {[]specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: set.Net}}, specs.Mount{Type: "sysfs", Options: []string{"rw"}}, false},
		"no namespace":     {[]specs.LinuxNamespace{gone}, specs.Mount{Type: "sysfs", Options: []string{"nosuid", "rw"}}, true},
		"read-only":        {[]specs.LinuxNamespace{gone}, specs.Mount{Type: "sysfs", Options: []string{"nosuid", "ro"}}, false},
		"bind mount":       {[]specs.LinuxNamespace{gone}, specs.Mount{Type: "bind", Source: "/sys", Options: []string{"rbind"}}, false},
		"a new namespace":  {[]specs.LinuxNamespace{{Type: specs.NetworkNamespace}}, specs.Mount{Type: "sysfs"}, false},
		"the node's":       {nil, specs.Mount{Type: "sysfs"}, false},
		"other namespaces": {[]specs.LinuxNamespace{{Type: specs.IPCNamespace, Path: gone.Path}}, specs.Mount{Type: "sysfs"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			release, err := holdSysfs(t.Context(), &specs.Spec{Mounts: []specs.Mount{c.mount}, Linux: &specs.Linux{Namespaces: c.namespaces}})
			if (err != nil) != c.fails {
				t.Fatalf("got %v", err)
			}
			if err == nil {
				release()
			}
		})
	}
}
