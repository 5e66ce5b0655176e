package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/logx"
	"github.com/crius-run/crius/server/control"
)

func (p *program) wipeCommand() *cobra.Command {
	var yes, keepImages bool
	cmd := &cobra.Command{
		Use:   "wipe",
		Short: "Remove all pods, containers, images and other state of crius from this node",
		Long: "Kill and remove all pods and containers, release their networks, and remove the images. " +
			"A running server does the work and continues with an empty node; stop the kubelet first, or it creates its pods again. " +
			"If no server is running, the state directories are removed as well. What cannot be removed is reported, stays on record, and makes the exit status 1.\n\n" +
			"It asks for confirmation first.",
		Args: cli.Operands,
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	cmd.Flags().BoolVar(&keepImages, "keep-images", false, "keep the images")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := p.load(cmd)
		if err != nil {
			return err
		}
		// Warnings of the backends do not belong into the output of a command.
		if err := logTo(cmd.ErrOrStderr(), "error"); err != nil {
			return err
		}
		if err := rootsOf(loaded.Config).ours(); err != nil {
			return err
		}
		if !hasState(loaded.Config) {
			fmt.Fprintf(cmd.OutOrStdout(), "there is no state in %s%s\n", cli.Printable(loaded.Config.Root), imagesLeft(loaded.Config, keepImages))
			return nil
		}
		ask := question(cmd.InOrStdin(), cmd.OutOrStdout())
		if yes {
			ask = func(about string) error {
				_, err := io.WriteString(cmd.OutOrStdout(), about)
				return err
			}
		}
		return wipe(cmd.Context(), loaded.Config, wiping{keepImages, ask, cmd.OutOrStdout()})
	}
	cmd.AddCommand(p.wipeForeignCommand())
	return cmd
}

// wiping has the options of a wipe.
type wiping struct {
	keepImages bool
	ask        func(about string) error
	out        io.Writer
}

func wipe(ctx context.Context, cfg config.Config, how wiping) (err error) {
	who, release, err := findKeeper(ctx, cfg)
	if err != nil {
		return err
	}
	defer closing(&err, release)
	holdings, err := who.Holdings(ctx)
	if err != nil {
		return fmt.Errorf("count pods, containers and images: %w", err)
	}
	if err := how.ask(loss(cfg, holdings, how.keepImages)); err != nil {
		return err
	}
	wiped, err := who.Wipe(ctx, how.keepImages)
	if err != nil {
		return err
	}
	for _, f := range wiped.Left {
		fmt.Fprintf(how.out, "left: %s: %s", cli.Printable(f.String()), cli.Printable(f.Wrong))
		for _, more := range []string{f.Err, f.Advice} {
			if more != "" {
				fmt.Fprintf(how.out, ": %s", cli.Printable(more))
			}
		}
		fmt.Fprintln(how.out)
	}
	for _, text := range wiped.Errors {
		fmt.Fprintf(how.out, "left: %s\n", cli.Printable(text))
	}
	if !wiped.Done() {
		return fmt.Errorf("not everything was removed; the rest stays on record, run crius wipe again")
	}
	fmt.Fprintln(how.out, gone(holdings, how.keepImages))
	return nil
}

// imagesLeft says that a wipe without state leaves the image store alone, in which another program may
// have all images; empty: there is none, or it is to be kept.
func imagesLeft(cfg config.Config, keep bool) string {
	roots, err := cfg.Image.Roots()
	if keep || err != nil {
		return ""
	}
	if _, err := os.Stat(roots.Graph); err != nil {
		return ""
	}
	return fmt.Sprintf("; the images in %s are left alone, since no crius has them on record: start crius and wipe again to remove them", cli.Printable(roots.Graph))
}

// gone describes what a wipe has removed.
func gone(h control.Holdings, keepImages bool) string {
	text := fmt.Sprintf("removed: pods %d, containers %d", h.Pods, h.Containers)
	if !keepImages {
		text += fmt.Sprintf(", images %d", h.Images)
	}
	return text
}

// loss describes what a wipe will remove.
func loss(cfg config.Config, h control.Holdings, keepImages bool) string {
	mib := func(bytes uint64) float64 { return float64(bytes) / (1 << 20) }
	var b strings.Builder
	fmt.Fprintf(&b, "This removes from the node:\n  pods        %d\n  containers  %d, of which %d run and are killed", h.Pods, h.Containers, liveContainers(cfg.RunRoot))
	if h.ContainerBytes > 0 {
		fmt.Fprintf(&b, "; %.1f MiB in writable layers", mib(h.ContainerBytes))
	}
	b.WriteString("\n")
	if !keepImages {
		fmt.Fprintf(&b, "  images      %d, %.1f MiB", h.Images, mib(h.ImageBytes))
		if cfg.Image.Root == "" {
			b.WriteString("; podman, skopeo and buildah share this store")
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "  state       %s, %s\n", cfg.Root, cfg.RunRoot)
	return b.String()
}

// question returns a function that asks for confirmation on a terminal. Without a terminal
// the function returns a cli.UsageError.
func question(in io.Reader, out io.Writer) func(string) error {
	return func(about string) error {
		if !cli.IsTerminal(in) {
			return cli.UsageError{Err: errors.New("no terminal to ask for confirmation; use --yes to wipe without asking"), Command: "crius wipe"}
		}
		fmt.Fprintf(out, "%sType yes to continue: ", about)
		line, err := bufio.NewReader(in).ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if strings.TrimSpace(line) != "yes" {
			return errors.New("nothing was removed")
		}
		return nil
	}
}

// logTo sends the log of this process to w, from the level called name on.
func logTo(w io.Writer, name string) error {
	level, err := logx.Level(name)
	if err != nil {
		return err
	}
	logger, err := logx.New(w, "text", level)
	if err != nil {
		return err
	}
	slog.SetDefault(logger)
	return nil
}
