package spec

import (
	"encoding/json"
	"path"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// annotations writes the keys by which runtimes and node tools identify a
// container, in both families that they know; an empty name means the pod's
// infra container. Later sources override earlier ones: the node, the pod, the
// container, crius. From the pod and the container only annotations that the
// handler allows reach the runtime: runtimes act on some of them with root's
// powers (CVE-2023-6476, CVE-2024-3154).
func annotations(container string) rule {
	return func(in *Input, s *specs.Spec) error {
		s.Annotations = map[string]string{}
		for _, annotation := range in.Defaults.Annotations {
			key, value, _ := strings.Cut(annotation, "=")
			s.Annotations[key] = value
		}
		pass(s.Annotations, in.Request.Pod.GetAnnotations(), in.Defaults.AllowedAnnotations)
		pass(s.Annotations, in.Request.Container.GetAnnotations(), in.Defaults.AllowedContainerAnnotations)
		kind := "sandbox"
		if container != "" {
			kind = "container"
			s.Annotations["io.kubernetes.cri.container-name"] = container
			s.Annotations["io.kubernetes.cri.image-name"] = in.Request.Container.GetImage().GetImage()
			s.Annotations["io.kubernetes.cri-o.ContainerName"] = container
		}
		pod := in.Request.Pod.GetMetadata()
		for key, value := range map[string]string{
			"io.kubernetes.cri.container-type":    kind,
			"io.kubernetes.cri.sandbox-id":        in.Facts.PodID,
			"io.kubernetes.cri.sandbox-name":      pod.GetName(),
			"io.kubernetes.cri.sandbox-namespace": pod.GetNamespace(),
			"io.kubernetes.cri.sandbox-uid":       pod.GetUid(),
			"io.kubernetes.cri-o.ContainerType":   kind,
			"io.kubernetes.cri-o.SandboxID":       in.Facts.PodID,
			"io.kubernetes.cri-o.SandboxName":     pod.GetName(),
			"io.kubernetes.cri-o.Namespace":       pod.GetNamespace(),
		} {
			s.Annotations[key] = value
		}
		return nil
	}
}

// pass copies the annotations whose keys are allowed.
func pass(to, from map[string]string, allowed []string) {
	for key, value := range from {
		if slices.ContainsFunc(allowed, func(pattern string) bool { return admits(pattern, key) }) {
			to[key] = value
		}
	}
}

// admits reports whether an allowed key or pattern covers a key. A pattern
// never covers a key by which crius identifies a container to runtimes: crius
// does not write all of them for every container, and a pod could add the
// missing ones.
func admits(pattern, key string) bool {
	if pattern == key {
		return true
	}
	if strings.HasPrefix(key, "io.kubernetes.cri.") || strings.HasPrefix(key, "io.kubernetes.cri-o.") {
		return false
	}
	matched, err := path.Match(pattern, key)
	return err == nil && matched
}

// sizing tells a virtual machine handler how large the pod's machine must be
// and how much overhead it may have: in containerd's keys, which Kata reads,
// and in CRI-O's, which hold the CRI's own messages.
func sizing(in *Input, s *specs.Spec) error {
	linux := in.Request.Pod.GetLinux()
	for key, r := range map[string]*cri.LinuxContainerResources{
		"io.kubernetes.cri-o.PodLinuxResources": linux.GetResources(),
		"io.kubernetes.cri-o.PodLinuxOverhead":  linux.GetOverhead(),
	} {
		if r == nil {
			continue
		}
		text, err := json.Marshal(r)
		if err != nil {
			return err
		}
		s.Annotations[key] = string(text)
	}
	r := linux.GetResources()
	if r == nil {
		return nil
	}
	for key, value := range map[string]int64{
		"io.kubernetes.cri.sandbox-cpu-period": r.GetCpuPeriod(),
		"io.kubernetes.cri.sandbox-cpu-quota":  r.GetCpuQuota(),
		"io.kubernetes.cri.sandbox-cpu-shares": r.GetCpuShares(),
		"io.kubernetes.cri.sandbox-memory":     r.GetMemoryLimitInBytes(),
	} {
		s.Annotations[key] = strconv.FormatInt(value, 10)
	}
	return nil
}
