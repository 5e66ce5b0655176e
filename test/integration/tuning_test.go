package integration

import (
	"errors"
	"os"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
)

// tuningAllowed is configuration that lets pods tune what is the container's
// and the pod's own. Tuning of the whole machine is tested only in package
// tuning.
const tuningAllowed = `
[tuning]
shared_cpuset = "1"
irqbalance_config_files = []
[runtime.handlers.runc]
allowed_annotations = ["cpu-quota.crio.io", "cpu-load-balancing.crio.io", "cpu-shared.crio.io"]
[runtime.handlers.crun]
allowed_annotations = ["cpu-quota.crio.io", "cpu-load-balancing.crio.io", "cpu-shared.crio.io"]
`

// guaranteed makes the cgroup of a Guaranteed pod, which the kubelet limits to
// one CPU.
func (w *world) guaranteed(t *testing.T, name string) (parent string) {
	t.Helper()
	parent = w.CgroupParent() + "/pod" + name
	must(t, cgroup.Make(parent))
	t.Cleanup(func() {
		for _, dir := range inventory.Cgroups(parent) {
			os.Remove(dir)
		}
	})
	err := cgroup.WriteFile(parent, cpuQuota.v1, "100000")
	if errors.Is(err, fault.NotFound) {
		err = cgroup.WriteFile(parent, cpuQuota.v2, "100000 100000")
	}
	must(t, err)
	return parent
}

// A container with an exclusive CPU has no quota, and gets shared CPUs as well,
// whatever the kubelet sends later. The other containers of its pod are as
// requested.
func TestTunedCPUs(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: tuningAllowed})
	asked := func() *cri.LinuxContainerResources {
		return &cri.LinuxContainerResources{CpuShares: 1024, CpuPeriod: 100_000, CpuQuota: 100_000, CpusetCpus: "0"}
	}
	for _, handler := range handlers {
		quota := annotated(map[string]string{"cpu-quota.crio.io": "disable", "cpu-shared.crio.io/sharing": "enable"})
		parent := w.guaranteed(t, handler)
		p := w.run(t, handler, quota, func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent = parent })
		own := p.start(t, "sleep", named("own", asked()))
		sharing := p.start(t, "sleep", named("sharing", asked()))
		holds := func() {
			t.Helper()
			own.holds(t, cpus, "0", "0")
			own.holds(t, cpuQuota, "-1", "max 100000")
			sharing.holds(t, cpus, "0-1", "0-1")
			sharing.holds(t, cpuQuota, "-1", "max 100000")
		}
		holds()
		podQuota, _, err := cgroup.Quota(parent)
		must(t, err)
		equal(t, "quota of the pod", podQuota, 0)
		environment := sharing.procfs(t, "environ")
		for _, variable := range []string{"OPENSHIFT_ISOLATED_CPUS=0\x00", "OPENSHIFT_SHARED_CPUS=1\x00"} {
			equal(t, variable, strings.Contains(environment+"\x00", variable), true)
		}
		for _, c := range []*container{own, sharing} {
			_, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: c.id, Linux: asked()})
			must(t, err)
		}
		holds()

		half := asked()
		half.CpuShares, half.CpuQuota = 512, 50_000
		p.start(t, "sleep", named("half", half)).holds(t, cpuQuota, "50000", "50000 100000")
	}
}
