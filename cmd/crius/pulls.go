package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/storage/progress"
)

// watchPeriod is how often a watched list is shown.
const watchPeriod = time.Second

func (p *program) pullsCommand() *cobra.Command {
	var watch bool
	cmd := &cobra.Command{
		Use:   "pulls",
		Short: "Show the image pulls in progress",
		Long:  "List the image pulls of the running server. Layers are downloaded a few at a time and counted once their download starts, so totals grow.",
		Args:  cli.Usage(cobra.NoArgs),
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "refresh every second until interrupted")
	format := cli.FormatFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := p.loadForClient(cmd)
		if err != nil {
			return err
		}
		return cli.Ask(cmd.Context(), loaded.Config.API.Listen, func(ctx context.Context, server cli.Server) error {
			for {
				report, err := askStatus(ctx, server)
				if watch && ctx.Err() != nil {
					return nil //nolint:nilerr // interrupted: that is how it ends
				}
				if err != nil {
					return err
				}
				list := report.Server.Pulls
				err = format.Print(cmd.OutOrStdout(), list, func(w io.Writer) { cli.Table(w, func(w io.Writer) { writePulls(w, list) }) })
				if err != nil || !watch {
					return err
				}
				select {
				case <-time.After(watchPeriod):
				case <-ctx.Done():
					return nil
				}
			}
		})
	}
	return cmd
}

func writePulls(w io.Writer, list []progress.Pull) {
	for _, p := range list {
		took := time.Since(p.Since)
		rate := float64(p.Bytes) / took.Seconds() / (1 << 20)
		fmt.Fprintf(w, "%s\t%s\t%.1f of %.1f MiB\t%d of %d blobs\t%.1f MiB/s\n",
			cli.Printable(p.Image), cli.Brief(took), float64(p.Bytes)/(1<<20), float64(p.Total)/(1<<20), p.Done, p.Blobs, rate)
	}
}
