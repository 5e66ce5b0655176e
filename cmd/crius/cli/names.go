package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// PodNames explains in help texts how a command line names a pod.
const PodNames = "POD is a pod's name, with or without its namespace (NAMESPACE/NAME), or its id, or the beginning of that from three digits on"

// shortestID is how many digits of an id name a pod. Fewer are more often the name of a pod that is gone.
const shortestID = 3

// FindPods returns the pods that a command line names, which have one name and differ in their
// attempts, the latest first. A name counts before an id that begins like it.
func FindPods(ctx context.Context, server Server, pod string) ([]*cri.PodSandbox, error) {
	pods, err := server.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return nil, err
	}
	found := selected(pods.Items, func(p *cri.PodSandbox) bool {
		return pod == PodName(p.GetMetadata()) || pod == p.GetMetadata().GetName()
	})
	if len(found) == 0 {
		found = selected(pods.Items, func(p *cri.PodSandbox) bool {
			return p.Id == pod || len(pod) >= shortestID && strings.HasPrefix(p.Id, pod)
		})
	}
	names := map[string]bool{}
	for _, p := range found {
		names[PodName(p.GetMetadata())] = true
	}
	switch len(names) {
	case 0:
		return nil, fmt.Errorf("no pod %q: crius pods lists them", pod)
	case 1:
	default:
		return nil, fmt.Errorf("more than one pod matches, name one of them: %s", listed(names))
	}
	slices.SortFunc(found, func(a, b *cri.PodSandbox) int { return cmp.Compare(b.CreatedAt, a.CreatedAt) })
	return found, nil
}

func selected[T any](all []T, wanted func(T) bool) (found []T) {
	for _, one := range all {
		if wanted(one) {
			found = append(found, one)
		}
	}
	return found
}

// FindContainer returns the id of the newest container with this name in a pod. An empty
// name means the only container.
func FindContainer(ctx context.Context, server Server, pod, container string) (string, error) {
	pods, err := FindPods(ctx, server, pod)
	if err != nil {
		return "", err
	}
	ids := map[string]bool{}
	for _, p := range pods {
		ids[p.Id] = true
	}
	all, err := server.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return "", err
	}
	names := map[string]bool{}
	var newest *cri.Container
	for _, c := range all.Containers {
		name := c.GetMetadata().GetName()
		if !ids[c.PodSandboxId] {
			continue
		}
		names[name] = true
		if (container == "" || container == name) && (newest == nil || c.CreatedAt > newest.CreatedAt) {
			newest = c
		}
	}
	full := Printable(PodName(pods[0].GetMetadata()))
	switch {
	case len(names) == 0:
		return "", fmt.Errorf("pod %s has no container", full)
	case newest == nil:
		return "", fmt.Errorf("pod %s has no container %q: it has %s", full, container, listed(names))
	case container == "" && len(names) > 1:
		return "", fmt.Errorf("pod %s has more than one container, name one of them: %s", full, listed(names))
	}
	return newest.Id, nil
}

// completeTime bounds how long a shell waits for names.
const completeTime = 2 * time.Second

// CompleteContainer lets shells complete the name of a pod, and after it that of one of its
// containers.
func CompleteContainer(load Load) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		return complete(cmd, load, func(ctx context.Context, server Server) (names []string, _ error) {
			pods, err := server.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
			if err != nil || len(args) > 1 {
				return nil, err
			}
			ids := map[string]bool{}
			for _, p := range pods.Items {
				full := PodName(p.GetMetadata())
				ids[p.Id] = len(args) == 1 && (args[0] == full || args[0] == p.GetMetadata().GetName())
				names = append(names, full)
			}
			if len(args) == 0 {
				return names, nil
			}
			all, err := server.ListContainers(ctx, &cri.ListContainersRequest{})
			names = nil
			for _, c := range all.GetContainers() {
				if ids[c.PodSandboxId] {
					names = append(names, c.GetMetadata().GetName())
				}
			}
			return names, err
		})
	}
}

// CompleteImage lets shells complete the name of an image of the node.
func CompleteImage(load Load) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		return complete(cmd, load, func(ctx context.Context, server Server) (names []string, _ error) {
			if len(args) > 0 {
				return nil, nil
			}
			images, err := server.ListImages(ctx, &cri.ListImagesRequest{})
			for _, i := range images.GetImages() {
				names = append(names, i.RepoTags...)
			}
			return names, err
		})
	}
}

// complete returns what find finds at the server, and nothing if it cannot be asked.
func complete(cmd *cobra.Command, load Load, find func(context.Context, Server) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	loaded, err := load(cmd)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completeTime)
	defer cancel()
	var names []string
	_ = Ask(ctx, loaded.Config.API.Listen, func(ctx context.Context, server Server) error {
		names, err = find(ctx, server)
		return err
	})
	names = slices.DeleteFunc(names, func(name string) bool { return Printable(name) != name })
	slices.Sort(names)
	return slices.Compact(names), cobra.ShellCompDirectiveNoFileComp
}

// listed returns names in order, separated by commas.
func listed(found map[string]bool) string {
	var names []string
	for one := range found {
		names = append(names, Printable(one))
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// PodName is NAMESPACE/NAME.
func PodName(m *cri.PodSandboxMetadata) string { return m.GetNamespace() + "/" + m.GetName() }
