package images

import (
	"context"
	"fmt"
	"io"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
)

// profile is a seccomp profile in the list.
type profile struct {
	Refs   []string `json:"refs"`
	Digest string   `json:"digest"`
	Size   uint64   `json:"sizeBytes"`
}

// listProfiles prints the pulled seccomp profiles.
func listProfiles(ctx context.Context, server cli.Server, out io.Writer, format *cli.Format) error {
	resp, err := server.ListSecurityProfiles(ctx, &cri.ListSecurityProfilesRequest{})
	if err != nil {
		return err
	}
	list := []profile{}
	for _, p := range resp.GetProfiles() {
		list = append(list, profile{append([]string{}, p.GetRefs()...), p.GetDigest(), p.GetSize()})
	}
	return format.Print(out, list, func(w io.Writer) { cli.Table(w, func(w io.Writer) { writeProfiles(w, list) }) })
}

func writeProfiles(w io.Writer, list []profile) {
	fmt.Fprintln(w, "PROFILE\tDIGEST\tSIZE")
	for _, p := range list {
		refs := p.Refs
		if len(refs) == 0 {
			refs = []string{"<none>"}
		}
		for _, ref := range refs {
			fmt.Fprintf(w, "%s\t%s\t%.1f KiB\n", cli.Printable(ref), cli.Printable(p.Digest), float64(p.Size)/(1<<10))
		}
	}
}
