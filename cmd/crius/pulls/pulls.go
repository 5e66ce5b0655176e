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
		Long: "List the image pulls of the running server, and the latest warnings that registries sent to users. " +
			"Layers are downloaded a few at a time and counted once their download starts, so totals grow. " +
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
		switch {
		case watch && *format == "text" && cli.IsTerminal(out):
			out, write = cli.NewPages(out), new(bars).write
		case watch:
			out = cli.Changes(out)
		}
		return cli.Ask(cmd.Context(), loaded.Config.API.Listen, func(ctx context.Context, server cli.Server) error {
			for {
				found, err := ask(ctx, server)
				if watch && ctx.Err() != nil {
					return nil //nolint:nilerr // an interrupt ends it normally
				}
				if err != nil {
					return err
				}
				now := time.Now()
				err = format.Print(out, found.Pulls, func(w io.Writer) {
					cli.Table(w, func(w io.Writer) { write(w, found.Pulls, now) })
					writeWarnings(w, found.Warnings)
				})
				if err != nil || !watch || !cli.Pause(ctx, period) {
					return err
				}
			}
		})
	}
	return cmd
}

// report is what a server's verbose status has of pulls.
type report struct {
	Pulls    []progress.Pull
	Warnings []progress.Warning `json:"registry_warnings"`
}

func ask(ctx context.Context, server cli.Server) (r report, err error) {
	err = cli.Vitals(ctx, server, &r)
	return r, err
}

// writeWarnings writes a line for each warning of a registry.
func writeWarnings(w io.Writer, list []progress.Warning) {
	for _, one := range list {
		fmt.Fprintf(w, "%s %s: registry %s warns: %s\n", one.Time.Local().Format(time.DateTime), cli.Printable(one.Image), cli.Printable(one.Registry), cli.Printable(one.Text))
	}
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
