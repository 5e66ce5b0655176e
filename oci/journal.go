package oci

import (
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// JournalFields returns the fields that identify a container in the journal.
// The CONTAINER_* fields and the syslog identifier are those of CRI-O's conmon,
// by which programs that read journals recognize Kubernetes' containers; the
// others are for people.
func JournalFields(id string, pod *cri.PodSandboxMetadata, container *cri.ContainerMetadata) []string {
	name := fmt.Sprintf("k8s_%s_%s_%s_%s_%d", container.GetName(), pod.GetName(), pod.GetNamespace(), pod.GetUid(), container.GetAttempt())
	return []string{
		"CONTAINER_ID=" + id[:min(12, len(id))],
		"CONTAINER_ID_FULL=" + id,
		"CONTAINER_NAME=" + name,
		"SYSLOG_IDENTIFIER=" + name,
		"K8S_NAMESPACE_NAME=" + pod.GetNamespace(),
		"K8S_POD_NAME=" + pod.GetName(),
		"K8S_POD_UID=" + pod.GetUid(),
		"K8S_CONTAINER_NAME=" + container.GetName(),
	}
}
