package integration

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
)

// Installers see the runtime that they know, write their handlers for it, and restart it. Pods run on
// through all of that, there and back.
func TestIdentityIsSwitchedUnderRunningPods(t *testing.T) {
	t.Parallel()
	runc, err := exec.LookPath("runc")
	must(t, err)
	w := private(t, node.Options{})
	c := w.run(t, "runc").start(t, "sleep")
	since := c.status(t).StartedAt
	// As nvidia-ctk and kata-deploy write them; the programs of the second are not there yet.
	must(t, w.Write("crio.conf.d/99-nvidia.conf", "[crio]\n\n  [crio.runtime]\n\n    [crio.runtime.runtimes]\n\n"+
		"      [crio.runtime.runtimes.nvidia]\n        runtime_path = \"{{.Path \"nvidia-container-runtime\"}}\"\n        runtime_type = \"oci\"\n"))
	must(t, w.Write("crio.conf.d/99-kata-deploy", "[crio.runtime.runtimes.kata-qemu]\n\truntime_path = \"/opt/kata/bin/containerd-shim-kata-v2\"\n"+
		"\truntime_type = \"vm\"\n\truntime_root = \"/run/vc\"\n\tprivileged_without_host_devices = true\n"))
	must(t, os.WriteFile(w.Path("nvidia-container-runtime"), []byte("#!/bin/sh\nexec "+runc+" \"$@\"\n"), 0o755))

	for _, identity := range []struct{ name, config string }{
		{"cri-o", "[api]\nruntime_name = 'cri-o'\ncrio_socket = '{{.Path \"crio.sock\"}}'\n[runtime]\ncrio_handlers_dir = '{{.Path \"crio.conf.d\"}}'\n"},
		{"containerd", "[api]\nruntime_name = 'containerd'\n"},
		{"crius", ""},
	} {
		must(t, w.Configure("50-identity", identity.config))
		must(t, w.Restart(t.Context()))
		v, err := w.Runtime().Version(t.Context(), &cri.VersionRequest{})
		must(t, err)
		equal(t, "name", v.RuntimeName, identity.name)
		if own := !strings.Contains(v.RuntimeVersion, "+crius."); own != (identity.name == "crius") {
			t.Errorf("%s has the version %s", identity.name, v.RuntimeVersion)
		}
		s := c.status(t)
		if s.State != cri.ContainerState_CONTAINER_RUNNING || s.StartedAt != since {
			t.Errorf("the container under %s: %v, started at %d, before at %d", identity.name, s.State, s.StartedAt, since)
		}
		equal(t, "output of a command in it", c.exec(t, "echo here"), "here\n")
		if identity.name == "cri-o" {
			p := w.run(t, "nvidia")
			p.start(t, "sleep")
			p.remove(t)
		}
	}
}
