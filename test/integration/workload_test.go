package integration

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/scene"
)

// named gives a container its name, by which annotations refer to it.
func named(name string, r *cri.LinuxContainerResources) containerChange {
	return func(c *cri.ContainerConfig) { c.Metadata.Name, c.Linux.Resources = name, r }
}

// Pods of OpenShift's workload partitioning get their CPUs from the node. These
// CPUs survive updates by the kubelet and restarts of the server, also one with
// another configuration.
func TestWorkloadPartitioning(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: `
[runtime.workloads.management]
activation_annotation = "target.workload.openshift.io/management"
annotation_prefix = "resources.workload.openshift.io"
allowed_annotations = ["umask.crio.io"]
resources = { cpushares = 512, cpuset = "0" }
`})
	workload := annotated(map[string]string{
		"target.workload.openshift.io/management": `{"effect": "PreferredDuringScheduling"}`,
		"resources.workload.openshift.io/limited": `{"cpushares": 1024, "cpulimit": 500}`,
		"umask.crio.io": "0027",
	})
	asked := func() *cri.LinuxContainerResources {
		return &cri.LinuxContainerResources{CpuShares: 2, CpuPeriod: 50_000, CpuQuota: 10_000, CpusetCpus: "1", MemoryLimitInBytes: 64 * mib}
	}
	forPod, forContainer := pidMode(cri.NamespaceMode_POD)
	var limited []*container
	holds := func(t *testing.T, c *container) {
		t.Helper()
		c.holds(t, cpus, "0", "0")
		c.holds(t, cpuShares, "1024", "39")
		c.holds(t, cpuQuota, "25000", "25000 50000")
		status := c.status(t).Resources.GetLinux()
		equal(t, "CPU shares in the status", status.GetCpuShares(), 1024)
		equal(t, "CPU set in the status", status.GetCpusetCpus(), "0")
	}
	for _, handler := range handlers {
		p := w.run(t, handler, workload, forPod)
		c := p.start(t, "sleep", named("limited", asked()), forContainer)
		holds(t, c)
		c.holds(t, memoryLimit, "67108864", "67108864")
		equal(t, "umask that the workload allows", strings.Contains(c.procfs(t, "status"), "Umask:\t0027\n"), true)
		limited = append(limited, c)

		plain := p.start(t, "sleep", named("plain", asked()), forContainer)
		plain.holds(t, cpus, "0", "0")
		plain.holds(t, cpuShares, "512", "20")
		plain.holds(t, cpuQuota, "10000", "10000 50000")

		infra := scene.Procfs(t, w.processesOf(t, p.id), "status")
		equal(t, "CPUs of the infra container", strings.Contains(infra, "Cpus_allowed_list:\t0\n"), true)

		other := w.run(t, handler).start(t, "sleep", named("limited", asked()))
		other.holds(t, cpus, "1", "1")
		other.holds(t, cpuShares, "2", "1")
	}
	update := func(t *testing.T, c *container) {
		t.Helper()
		_, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: c.id, Linux: &cri.LinuxContainerResources{
			CpuShares: 2, CpuPeriod: 100_000, CpuQuota: 70_000, CpusetCpus: "0-1", MemoryLimitInBytes: 80 * mib,
		}})
		must(t, err)
		holds(t, c)
		c.holds(t, memoryLimit, "83886080", "83886080")
	}
	update(t, limited[0])
	must(t, w.Configure("20-other", "[runtime.workloads.management.resources]\ncpuset = \"1\"\ncpushares = 2048\n"))
	must(t, w.Restart(t.Context()))
	for _, c := range limited {
		update(t, c)
		c.pod.start(t, "sleep", named("later", asked()), forContainer).holds(t, cpus, "1", "1")
	}
}

// Exclusive CPUs of containers, and CPUs of infra containers. The handler of a
// runtime that cannot keep exec processes on some CPUs reports that.
func TestExecsOnFirstCPU(t *testing.T) {
	t.Parallel()
	runc, err := tools.Runc(t.Context())
	must(t, err)
	w := private(t, node.Options{Config: fmt.Sprintf(`
pod.infra_cpuset = "1"
[runtime.handlers.pinned]
path = %q
exec_cpu_affinity = "first"
[runtime.handlers.old]
path = "runc"
exec_cpu_affinity = "first"
`, runc)})
	forPod, forContainer := pidMode(cri.NamespaceMode_POD)
	p := w.run(t, "pinned", forPod)
	allowed := func(c *container) string {
		_, after, _ := strings.Cut(c.exec(t, "cat /proc/self/status"), "Cpus_allowed_list:\t")
		list, _, _ := strings.Cut(after, "\n")
		return list
	}
	own := p.start(t, "sleep", named("own", &cri.LinuxContainerResources{CpuShares: 2048, CpusetCpus: "0-1"}), forContainer)
	equal(t, "CPUs of an exec", allowed(own), "0")
	equal(t, "CPUs of the container", strings.Contains(own.procfs(t, "status"), "Cpus_allowed_list:\t0-1\n"), true)
	_, err = w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: own.id, Linux: &cri.LinuxContainerResources{CpusetCpus: "1"}})
	must(t, err)
	equal(t, "CPUs of an exec once the container has others", allowed(own), "1")
	shared := p.start(t, "sleep", named("shared", &cri.LinuxContainerResources{CpuShares: 512, CpusetCpus: "0-1"}), forContainer)
	equal(t, "CPUs of an exec in a container that shares its CPUs", allowed(shared), "0-1")
	infra := scene.Procfs(t, w.processesOf(t, p.id), "status")
	equal(t, "CPUs of the infra container", strings.Contains(infra, "Cpus_allowed_list:\t1\n"), true)

	_, err = w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: w.podConfig(t), RuntimeHandler: "old"})
	wantCode(t, err, codes.Unavailable, "exec_cpu_affinity needs runc 1.3")
}

// A pod with an invalid request to its workload is refused before anything is
// made.
func TestWorkloadRefusals(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: `
[runtime.workloads.a]
activation_annotation = "example.com/a"
annotation_prefix = "example.com.resources"
[runtime.workloads.b]
activation_annotation = "example.com/b"
`})
	for _, c := range []struct {
		annotations map[string]string
		words       string
	}{
		{map[string]string{"example.com/a": "", "example.com.resources/app": `{"cpuset": "all"}`}, "annotation example.com.resources/app: cpuset"},
		{map[string]string{"example.com/a": "", "example.com.resources/app": `{"memory": 5}`}, "unknown resource"},
		{map[string]string{"example.com/a": "", "example.com/b": ""}, "workloads a and b"},
	} {
		_, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: w.podConfig(t, annotated(c.annotations))})
		wantCode(t, err, codes.InvalidArgument, c.words)
	}
}
