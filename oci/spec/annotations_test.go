package spec

import (
	"maps"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// No annotation of the pod reaches the runtime unless its key is allowed, and
// none can pose as one of crius's own.
func TestAnnotations_CVE_2023_6476_CVE_2024_3154(t *testing.T) {
	hostile := map[string]string{
		"org.systemd.property.ExecStart": "x", "run.oci.handler": "wasm", "run.oci.keep_original_groups": "1",
		"module.wasm.image/variant": "compat", "org.criu.config": "/x", "io.kubernetes.cri-o.UnifiedCgroup.server": "memory.max=max",
		"io.katacontainers.config.hypervisor.path": "/evil", "example.com/ok-not": "x", "EXAMPLE.com/ok": "x", "": "x",
		"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri-o.SandboxID": "other",
	}
	s := mutate(t, func(in *Input) {
		in.Request.Pod.Annotations = map[string]string{"example.com/ok": "yes"}
		for key, value := range hostile {
			in.Request.Pod.Annotations[key] = value
		}
		in.Request.Container.Annotations = hostile
		in.Request.Container.Labels = hostile
		in.Request.Image.Labels = hostile
		in.Defaults.AllowedAnnotations = []string{"example.com/ok", "io.kubernetes.cri.container-type", "example.com/", "run.oci.", "org.systemd.property", "*.image"}
	})
	for key := range s.Annotations {
		ours := strings.HasPrefix(key, "io.kubernetes.cri.") || strings.HasPrefix(key, "io.kubernetes.cri-o.")
		if !ours && key != "example.com/ok" || strings.Contains(key, "UnifiedCgroup") {
			t.Errorf("%s reached the runtime", key)
		}
	}
	for key, want := range map[string]string{
		"example.com/ok": "yes", "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri-o.ContainerType": "container",
		"io.kubernetes.cri.sandbox-id": podID, "io.kubernetes.cri-o.SandboxID": podID, "io.kubernetes.cri.container-name": "server",
	} {
		if got := s.Annotations[key]; got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
}

// A pattern covers the keys of one domain, separately for pods and containers,
// and never the keys by which runtimes identify the container.
func TestAnnotationPatterns(t *testing.T) {
	in := typical()
	in.Defaults.Annotations = []string{"io.katacontainers.both=node", "io.katacontainers.node=node"}
	in.Defaults.AllowedAnnotations = []string{"io.katacontainers.*", "io.kubernetes.*", "*"}
	in.Defaults.AllowedContainerAnnotations = []string{"io.katacontainers.*", "example.com/device-?", "example.com/[*]"}
	in.Request.Pod.Annotations = map[string]string{
		"io.katacontainers.config.hypervisor.default_vcpus": "2", "io.katacontainers.both": "pod",
		"io.katacontainers.a/b": "x", "example.com/device-1": "pod", "example.com/any": "x",
		"io.kubernetes.cri.container-name": "spoofed", "io.kubernetes.cri-o.PodLinuxOverhead": "{}",
	}
	in.Request.Container.Annotations = map[string]string{
		"io.katacontainers.both": "container", "example.com/device-0": "container", "example.com/device-10": "x",
		"example.com/any": "x", "run.oci.handler": "wasm",
	}
	container, err := Container(in)
	if err != nil {
		t.Fatal(err)
	}
	infra, err := Sandbox(in, []string{"/pause"})
	if err != nil {
		t.Fatal(err)
	}
	own := func(key string) bool { return !strings.HasPrefix(key, "io.kubernetes.") }
	for name, test := range map[string]struct{ got, want map[string]string }{
		"container": {container.Annotations, map[string]string{
			"io.katacontainers.config.hypervisor.default_vcpus": "2", "io.katacontainers.both": "container",
			"io.katacontainers.node": "node", "example.com/device-0": "container",
		}},
		"infra container": {infra.Annotations, map[string]string{
			"io.katacontainers.config.hypervisor.default_vcpus": "2", "io.katacontainers.both": "pod", "io.katacontainers.node": "node",
		}},
	} {
		got := maps.Clone(test.got)
		maps.DeleteFunc(got, func(key, _ string) bool { return !own(key) })
		if !maps.Equal(got, test.want) {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
	for _, key := range []string{"io.kubernetes.cri.container-name", "io.kubernetes.cri-o.PodLinuxOverhead"} {
		if value, ok := infra.Annotations[key]; ok {
			t.Errorf("the pod set %s of its infra container to %q by a pattern", key, value)
		}
	}
}

// TestInfraAnnotations: the infra container has no name, which gVisor would
// take for a container's, and a virtual machine is told its size.
func TestInfraAnnotations(t *testing.T) {
	in := typical()
	virtualMachine(&in)
	in.Request.Pod.Linux.Overhead = &cri.LinuxContainerResources{MemoryLimitInBytes: 1 << 20}
	s, err := Sandbox(in, []string{"/pause"})
	if err != nil {
		t.Fatal(err)
	}
	for key := range s.Annotations {
		if strings.Contains(strings.ToLower(key), "container-name") || strings.Contains(key, "ContainerName") {
			t.Errorf("%s is set", key)
		}
	}
	for key, want := range map[string]string{
		"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri-o.ContainerType": "sandbox",
		"io.kubernetes.cri.sandbox-cpu-quota": "200000", "io.kubernetes.cri.sandbox-memory": "1073741824",
		"io.katacontainers.config.hypervisor.default_vcpus": "2",
		"io.kubernetes.cri-o.PodLinuxOverhead":              `{"memory_limit_in_bytes":1048576}`,
		"io.kubernetes.cri-o.PodLinuxResources":             `{"cpu_period":100000,"cpu_quota":200000,"memory_limit_in_bytes":1073741824}`,
	} {
		if s.Annotations[key] != want {
			t.Errorf("%s is %q, want %q", key, s.Annotations[key], want)
		}
	}
}
