package integration

import (
	"encoding/json"
	"os"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// verboseInfo is the part of a verbose status that scripts with crictl and jq use.
type verboseInfo struct {
	PID         int         `json:"pid"`
	Privileged  bool        `json:"privileged"`
	RuntimeSpec *specs.Spec `json:"runtimeSpec"`
}

func decodeInfo(t *testing.T, info map[string]string) (doc verboseInfo) {
	t.Helper()
	must(t, json.Unmarshal([]byte(info["info"]), &doc))
	return doc
}

// crictl inspectp shows the pod's network namespace where containerd and CRI-O show it, whether or
// not the pod has an infra container; crictl inspect shows the limits in force.
func TestVerboseStatusHasTheRuntimeSpec(t *testing.T) {
	t.Parallel()
	w := shared(t)
	for _, handler := range handlers {
		withInfra, _ := pidMode(cri.NamespaceMode_POD)
		for _, change := range []podChange{func(*cri.PodSandboxConfig) {}, withInfra} {
			p := w.run(t, handler, change)
			resp, err := w.Runtime().PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: p.id, Verbose: true})
			must(t, err)
			found := 0
			for _, n := range decodeInfo(t, resp.Info).RuntimeSpec.Linux.Namespaces {
				if n.Type == specs.NetworkNamespace {
					_, err := os.Stat(n.Path)
					must(t, err)
					found++
				}
			}
			equal(t, "network namespaces of the pod", found, 1)
		}
		c := w.run(t, handler).start(t, "sleep", func(c *cri.ContainerConfig) { c.Linux.Resources.MemoryLimitInBytes = 64 * mib })
		_, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{
			ContainerId: c.id, Linux: &cri.LinuxContainerResources{MemoryLimitInBytes: 128 * mib},
		})
		must(t, err)
		resp, err := w.Runtime().ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: c.id, Verbose: true})
		must(t, err)
		doc := decodeInfo(t, resp.Info)
		equal(t, "memory limit", *doc.RuntimeSpec.Linux.Resources.Memory.Limit, int64(128*mib))
		equal(t, "privileged", doc.Privileged, false)
		equal(t, "pid is told", doc.PID > 0, true)
	}
	privileged := w.run(t, "runc", func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true }).
		start(t, "sleep", func(c *cri.ContainerConfig) { c.Linux.SecurityContext.Privileged = true })
	resp, err := w.Runtime().ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: privileged.id, Verbose: true})
	must(t, err)
	equal(t, "privileged", decodeInfo(t, resp.Info).Privileged, true)
}
