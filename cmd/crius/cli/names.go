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
const PodNames = "POD is a pod's name, with or without its namespace (NAMESPACE/NAME), or the beginning of its id"

// FindPods returns the pods that a command line names, which have one name and differ in their
// attempts, the latest first.
func FindPods(ctx context.Context, server Server, pod string) ([]*cri.PodSandbox, error) {
	pods, err := server.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	var found []*cri.PodSandbox
	for _, p := range pods.Items {
		full := PodName(p.GetMetadata())
		if pod == full || pod == p.GetMetadata().GetName() || strings.HasPrefix(p.Id, pod) {
			names[full] = true
			found = append(found, p)
		}
	}
	if len(names) != 1 {
		return nil, choice("pod", pod, names)
	}
	slices.SortFunc(found, func(a, b *cri.PodSandbox) int { return cmp.Compare(b.CreatedAt, a.CreatedAt) })
	return found, nil
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
