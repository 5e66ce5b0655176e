package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// PodNames explains in help texts how a command line names a pod.
const PodNames = "POD is a pod's name, with or without its namespace (NAMESPACE/NAME), or the beginning of its id"

// FindContainer returns the id of the newest container with this name in a pod. An empty
// name means the only container.
func FindContainer(ctx context.Context, server Server, pod, container string) (string, error) {
	pods, err := server.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return "", err
	}
	names := map[string]bool{} // of pods
	ids := map[string]bool{}
	for _, p := range pods.Items {
		full := PodName(p.GetMetadata())
		if pod == full || pod == p.GetMetadata().GetName() || strings.HasPrefix(p.Id, pod) {
			names[full], ids[p.Id] = true, true
		}
	}
	if len(names) != 1 {
		return "", choice("pod", pod, names)
	}
	all, err := server.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return "", err
	}
	names = map[string]bool{} // of containers
	var newest *cri.Container
	for _, c := range all.Containers {
		name := c.GetMetadata().GetName()
		if !ids[c.PodSandboxId] || container != "" && container != name {
			continue
		}
		names[name] = true
		if newest == nil || c.CreatedAt > newest.CreatedAt {
			newest = c
		}
	}
	if len(names) != 1 {
		return "", choice("container", container, names)
	}
	return newest.Id, nil
}

// choice is the error for a name that matches no object, or more than one.
func choice(kind, name string, found map[string]bool) error {
	if len(found) == 0 && name == "" {
		return fmt.Errorf("the pod has no %s", kind)
	}
	if len(found) == 0 {
		return fmt.Errorf("no %s %q", kind, name)
	}
	var names []string
	for one := range found {
		names = append(names, Printable(one))
	}
	slices.Sort(names)
	return fmt.Errorf("more than one %s matches, name one of them: %s", kind, strings.Join(names, ", "))
}

// PodName is NAMESPACE/NAME.
func PodName(m *cri.PodSandboxMetadata) string { return m.GetNamespace() + "/" + m.GetName() }
