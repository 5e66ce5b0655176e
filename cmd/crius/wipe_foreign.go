package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/storage/foreign"
)

func (p *program) wipeForeignCommand() *cobra.Command {
	var yes, list bool
	cmd := &cobra.Command{
		Use:   "foreign [CONTAINER...]",
		Short: "Remove containers that CRI-O has left in the image store",
		Long: "Remove the containers that CRI-O has left in the image store, with their writable layers: once CRI-O is gone, nothing else does. " +
			"Pods, containers and images of crius stay, and so do containers of podman and other programs. " +
			"With CONTAINER, an id or a name, remove only that one, whichever program has made it.\n\n" +
			"A container that is mounted, or to which a process belongs, is kept and reported, and makes the exit status 1; as long as CRI-O runs, so are all of its containers. " +
			"It asks for confirmation first.",
		Args: cli.Usage(cobra.ArbitraryArgs),
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	cmd.Flags().BoolVar(&list, "list", false, "only list the containers of all other programs")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		loaded, err := p.load(cmd)
		if err != nil {
			return err
		}
		if err := logTo(cmd.ErrOrStderr(), "error"); err != nil {
			return err
		}
		if list {
			return listForeign(cmd.Context(), loaded.Config, cmd.OutOrStdout())
		}
		ask := question(cmd.InOrStdin(), cmd.OutOrStdout())
		if yes {
			ask = func(string) error { return nil }
		}
		return wipeForeign(cmd.Context(), loaded.Config, args, ask, cmd.OutOrStdout())
	}
	return cmd
}

func listForeign(ctx context.Context, cfg config.Config, out io.Writer) (err error) {
	who, release, err := findLooker(ctx, cfg)
	if err != nil {
		return err
	}
	defer closing(&err, release)
	list, err := who.Foreign(ctx, true)
	if err != nil {
		return err
	}
	if len(list) == 0 {
		fmt.Fprintln(out, "there are no containers of other programs in the image store")
	}
	cli.Table(out, func(w io.Writer) { writeForeign(w, list) })
	return nil
}

// wipeForeign removes the containers that names select, after ask has confirmed.
func wipeForeign(ctx context.Context, cfg config.Config, names []string, ask func(string) error, out io.Writer) (err error) {
	who, release, err := findKeeper(ctx, cfg)
	if err != nil {
		return err
	}
	defer closing(&err, release)
	list, err := who.Foreign(ctx, true)
	if err != nil {
		return err
	}
	chosen, err := foreign.Select(list, names)
	if err != nil {
		return err
	}
	if len(chosen) == 0 {
		fmt.Fprintln(out, "there are no containers of CRI-O in the image store")
		return nil
	}
	var about strings.Builder
	about.WriteString("This removes from the image store, except what is in use:\n")
	cli.Table(&about, func(w io.Writer) { writeForeign(w, chosen) })
	if err := ask(about.String()); err != nil {
		return err
	}
	var ids []string
	for _, c := range chosen {
		ids = append(ids, c.ID)
	}
	result, err := who.RemoveForeign(ctx, ids)
	if err != nil {
		return err
	}
	for _, c := range result.Kept {
		fmt.Fprintf(out, "left: %s: %s\n", cli.Printable(foreignName(c)), cli.Printable(c.Kept))
	}
	fmt.Fprintf(out, "removed: containers %d\n", len(result.Removed))
	if len(result.Kept) > 0 {
		return errors.New("not everything was removed: end what uses the rest, then run crius wipe foreign again")
	}
	return nil
}

func writeForeign(w io.Writer, list []foreign.Container) {
	for _, c := range list {
		state := fmt.Sprintf("%.1f MiB", float64(c.Bytes)/(1<<20))
		if c.Kept != "" {
			state = "in use: " + c.Kept
		}
		fmt.Fprintf(w, "  %.13s\t%s\t%s\tcreated %s ago\t%s\n", cli.Printable(c.ID), cmp.Or(c.Runtime, "other"),
			cli.Printable(foreignName(c)), cli.Brief(time.Since(c.Created)), cli.Printable(state))
	}
}

// foreignName formats the name of a container for people.
func foreignName(c foreign.Container) string {
	if c.Pod == "" {
		return cmp.Or(c.Name, c.ID)
	}
	return c.Pod + " " + c.Name
}
