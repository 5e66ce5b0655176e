// Package pulls pulls images and shows the progress of a server's pulls.
package pulls

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/storage/pull/progress"
)

// period is the interval at which a watched list is refreshed.
const period = time.Second

// Command is crius pulls.
func Command(load cli.Load) *cobra.Command {
	var watch bool
	cmd := &cobra.Command{
		Use:   "pulls",
		Short: "Show the image pulls in progress",
		Long: "List the image pulls of the running server. Layers are downloaded a few at a time and counted once their download starts, so totals grow. " +
			"With --watch, a terminal shows bars with the rate of the last seconds and the time that the download of what is counted still takes.",
		Args: cli.Operands,
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "refresh every second until interrupted")
	format := cli.FormatFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := load(cmd)
		if err != nil {
			return err
		}
		out, write := cmd.OutOrStdout(), writeLines
		if watch && *format == "text" && cli.IsTerminal(out) {
			out, write = cli.NewPages(out), new(bars).write
		}
		return cli.Ask(cmd.Context(), loaded.Config.API.Listen, func(ctx context.Context, server cli.Server) error {
			for {
				list, err := active(ctx, server)
				if watch && ctx.Err() != nil {
					return nil //nolint:nilerr // an interrupt ends it normally
				}
				if err != nil {
					return err
				}
				now := time.Now()
				err = format.Print(out, list, func(w io.Writer) { cli.Table(w, func(w io.Writer) { write(w, list, now) }) })
				if err != nil || !watch || !cli.Pause(ctx, period) {
					return err
				}
			}
		})
	}
	return cmd
}

// active returns the pulls in the server's verbose status.
func active(ctx context.Context, server cli.Server) ([]progress.Pull, error) {
	var vitals struct{ Pulls []progress.Pull }
	err := cli.Vitals(ctx, server, &vitals)
	return vitals.Pulls, err
}

// writeLines writes a line for each pull, with its average rate since it began.
func writeLines(w io.Writer, list []progress.Pull, now time.Time) {
	if len(list) == 0 {
		fmt.Fprintln(w, "no image is being pulled")
	}
	for _, p := range list {
		took := now.Sub(p.Since)
		if p.Blobs == 0 || p.Throttled != "" {
			fmt.Fprintf(w, "%s\t%s\t%s\n", cli.Printable(p.Image), cli.Brief(took), registryState(p))
			continue
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", cli.Printable(p.Image), cli.Brief(took), amount(p), blobs(p), speed(p, float64(p.Bytes-p.Resumed)/took.Seconds()))
	}
}

// registryState says what a pull waits for that has no blobs yet, or may not ask for them.
func registryState(p progress.Pull) string {
	if p.Throttled == "" {
		return "asking the registry"
	}
	return fmt.Sprintf("registry %s asks to wait until %s (too many requests)", cli.Printable(p.Throttled), p.Until.Local().Format(time.TimeOnly))
}

func amount(p progress.Pull) string {
	text := fmt.Sprintf("%.1f of %s", float64(p.Bytes)/(1<<20), cli.MiB(uint64(p.Total)))
	if p.Resumed > 0 {
		text += fmt.Sprintf(" (%s resumed)", cli.MiB(uint64(p.Resumed)))
	}
	return text
}

func blobs(p progress.Pull) string {
	text := fmt.Sprintf("%d of %d blobs", p.Done, p.Blobs)
	if p.Unpacking > 0 {
		text += fmt.Sprintf(", %d being unpacked", p.Unpacking)
	}
	return text
}

func speed(p progress.Pull, perSec float64) string {
	text := fmt.Sprintf("%.1f MiB/s", perSec/(1<<20))
	if p.Connections > 1 {
		text += fmt.Sprintf(" over %d connections", p.Connections)
	}
	return text
}
