package pulls

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/credentials"
	"github.com/crius-run/crius/storage/pull/progress"
)

// linePeriod is the interval between lines if the output is not a terminal.
const linePeriod = 10 * time.Second

// PullCommand is crius pull.
func PullCommand(load cli.Load) *cobra.Command {
	var given credentials.Flags
	cmd := &cobra.Command{
		Use:   "pull IMAGE",
		Short: "Pull an image",
		Long: "Have the running server pull an image, with the registries, credentials and signature policy that it uses for pods, and print the image's id. " +
			"Credentials given here are for this pull and the image's registry only, and are not stored. " +
			"Standard error shows how far it has come: on a terminal as a bar, else as a line every ten seconds. " +
			"If crius is interrupted, the server continues for some minutes.",
		Args:              cli.Operands,
		ValidArgsFunction: cli.CompleteImage(load),
		RunE: func(cmd *cobra.Command, args []string) error {
			loaded, err := load(cmd)
			if err != nil {
				return err
			}
			auth, err := given.Read(cmd, args[0])
			if err != nil {
				return err
			}
			return cli.Ask(cmd.Context(), loaded.Config.API.Listen, func(ctx context.Context, server cli.Server) error {
				id, err := pullImage(ctx, server, args[0], auth, cmd.ErrOrStderr())
				if err == nil {
					_, err = fmt.Fprintln(cmd.OutOrStdout(), cli.Printable(id))
				}
				return err
			})
		},
	}
	given.Add(cmd)
	return cmd
}

// pullImage shows the pull on out until it has ended.
func pullImage(ctx context.Context, server cli.Server, image string, auth *cri.AuthConfig, out io.Writer) (id string, err error) {
	began := time.Now()
	watching, end := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		watch(watching, server, image, out)
	}()
	answer, err := server.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: image}, Auth: auth})
	end()
	<-watched
	if ctx.Err() != nil {
		return "", errors.New("interrupted; the server continues for some minutes, and crius pulls shows it")
	}
	tellWarnings(ctx, server, image, began, out)
	return answer.GetImageRef(), err
}

// tellWarnings writes what registries had to say about an image since then. It ignores errors: the pull
// has ended.
func tellWarnings(ctx context.Context, server cli.Server, image string, since time.Time, out io.Writer) {
	found, err := ask(ctx, server)
	if err != nil {
		return
	}
	writeWarnings(out, slices.DeleteFunc(found.Warnings, func(w progress.Warning) bool { return w.Time.Before(since) || !isNamed(w.Image, image) }))
}

// watch shows the pulls of an image until ctx ends. It ignores errors: the pull itself
// reports them.
func watch(ctx context.Context, server cli.Server, image string, out io.Writer) {
	every, write := linePeriod, writeLines
	if cli.IsTerminal(out) {
		every, write = period, new(bars).write
		pages := cli.NewPages(out)
		defer func() { _, _ = pages.Write(nil) }() // further output replaces the bar
		out = pages
	}
	for cli.Pause(ctx, every) {
		found, err := ask(ctx, server)
		if err != nil {
			continue
		}
		list := slices.DeleteFunc(found.Pulls, func(p progress.Pull) bool { return !isNamed(p.Image, image) })
		now := time.Now()
		_ = cli.Format("text").Print(out, list, func(w io.Writer) { cli.Table(w, func(w io.Writer) { write(w, list, now) }) })
	}
}

// isNamed reports whether a short name may stand for the full name of an image.
func isNamed(full, name string) bool {
	if !strings.ContainsAny(name[strings.LastIndex(name, "/")+1:], ":@") {
		name += ":latest"
	}
	return full == name || strings.HasSuffix(full, "/"+name)
}
