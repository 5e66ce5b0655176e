// Package kubelet builds CRI requests as a kubelet does, and reads the log
// files that a kubelet reads.
//
// A request is a plain protobuf message with sensible contents; callers change
// the part that they test with a function literal:
//
//	pod := kubelet.Pod("web", func(c *cri.PodSandboxConfig) { c.Hostname = "web" })
package kubelet

import (
	"crypto/rand"
	"path/filepath"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Pod returns a pod with its own network, IPC and UTS namespaces and a PID
// namespace per container, like a plain pod of Kubernetes. Its uid is new each
// time.
func Pod(name string, change ...func(*cri.PodSandboxConfig)) *cri.PodSandboxConfig {
	uid := strings.ToLower(rand.Text())
	c := &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: name, Uid: uid, Namespace: "default"},
		Hostname: name,
		Labels: map[string]string{
			"io.kubernetes.pod.name":      name,
			"io.kubernetes.pod.namespace": "default",
			"io.kubernetes.pod.uid":       uid,
		},
		Annotations: map[string]string{"kubernetes.io/config.source": "api"},
		Linux: &cri.LinuxPodSandboxConfig{
			SecurityContext: &cri.LinuxSandboxSecurityContext{
				NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
				Seccomp:          &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault},
			},
		},
	}
	for _, f := range change {
		f(c)
	}
	return c
}

// HostNetwork puts a pod into the node's network namespace.
func HostNetwork(c *cri.PodSandboxConfig) {
	c.Hostname = ""
	c.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
}

// LogsBelow gives a pod a log directory, named as a kubelet names it.
func LogsBelow(dir string) func(*cri.PodSandboxConfig) {
	return func(c *cri.PodSandboxConfig) {
		m := c.Metadata
		c.LogDirectory = filepath.Join(dir, m.Namespace+"_"+m.Name+"_"+m.Uid)
	}
}

// Container returns a container that runs args with the image's entry point and
// logs to NAME/ATTEMPT.log below its pod's log directory.
func Container(name, image string, args []string, change ...func(*cri.ContainerConfig)) *cri.ContainerConfig {
	c := &cri.ContainerConfig{
		Metadata:    &cri.ContainerMetadata{Name: name},
		Image:       &cri.ImageSpec{Image: image, UserSpecifiedImage: image},
		Args:        args,
		LogPath:     filepath.Join(name, "0.log"),
		Labels:      map[string]string{"io.kubernetes.container.name": name},
		Annotations: map[string]string{"io.kubernetes.container.restartCount": "0"},
		Linux: &cri.LinuxContainerConfig{
			Resources: &cri.LinuxContainerResources{CpuShares: 2, OomScoreAdj: 1000},
			SecurityContext: &cri.LinuxContainerSecurityContext{
				NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
				Seccomp:          &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault},
				MaskedPaths: []string{
					"/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
					"/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
				},
				ReadonlyPaths: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
			},
		},
	}
	for _, f := range change {
		f(c)
	}
	return c
}
