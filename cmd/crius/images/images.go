// Package images lists the images of a node.
package images

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
)

// Command is crius images.
func Command(load cli.Load) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "images",
		Short: "List the images",
		Long: "List the images of the running server by name: each with its id, its size as unpacked, the number of containers that use it, running or not, " +
			"and whether it is pinned, that is, kept from the kubelet's garbage collection. Images that share layers count them each. " +
			"An image without a tag is listed by its digest. With --profiles, list the seccomp profiles that the kubelet has pulled, which are no images.",
		Args: cli.Operands,
	}
	format := cli.FormatFlag(cmd)
	profiles := cmd.Flags().Bool("profiles", false, "list the pulled seccomp profiles instead: each with the references by which it was pulled, its digest and its size")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := load(cmd)
		if err != nil {
			return err
		}
		return cli.Ask(cmd.Context(), loaded.Config.API.Listen, func(ctx context.Context, server cli.Server) error {
			if *profiles {
				return listProfiles(ctx, server, cmd.OutOrStdout(), format)
			}
			images, err := server.ListImages(ctx, &cri.ListImagesRequest{})
			if err != nil {
				return err
			}
			containers, err := server.ListContainers(ctx, &cri.ListContainersRequest{})
			if err != nil {
				return err
			}
			list := used(images.Images, containers.Containers)
			return format.Print(cmd.OutOrStdout(), list, func(w io.Writer) { cli.Table(w, func(w io.Writer) { write(w, list) }) })
		})
	}
	return cmd
}

// image is an image in the list.
type image struct {
	Names      []string `json:"names"`
	Digests    []string `json:"digests"`
	ID         string   `json:"id"`
	Size       uint64   `json:"sizeBytes"`
	Containers int      `json:"containers"` // number of containers that use it
	Pinned     bool     `json:"pinned"`
}

// used joins the images with the containers that use them, sorted by name.
func used(images []*cri.Image, containers []*cri.Container) []image {
	users := map[string]int{}
	for _, c := range containers {
		users[c.ImageId]++
	}
	list := []image{}
	for _, i := range images {
		list = append(list, image{append([]string{}, i.RepoTags...), append([]string{}, i.RepoDigests...), i.Id, i.Size, users[i.Id], i.Pinned})
	}
	slices.SortFunc(list, func(a, b image) int {
		return cmp.Or(cmp.Compare(a.titles()[0], b.titles()[0]), cmp.Compare(a.ID, b.ID))
	})
	return list
}

// titles returns the names under which the image is listed, at least one.
func (i image) titles() []string {
	switch {
	case len(i.Names) > 0:
		return i.Names
	case len(i.Digests) > 0:
		return i.Digests[:1]
	}
	return []string{"<none>"}
}

func write(w io.Writer, list []image) {
	fmt.Fprintln(w, "IMAGE\tID\tSIZE\tCONTAINERS\tPINNED")
	for _, i := range list {
		pinned := "no"
		if i.Pinned {
			pinned = "yes"
		}
		for _, name := range i.titles() {
			fmt.Fprintf(w, "%s\t%.13s\t%s\t%d\t%s\n", cli.Printable(name), i.ID, cli.MiB(i.Size), i.Containers, pinned)
		}
	}
}
