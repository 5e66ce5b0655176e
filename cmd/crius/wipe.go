package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/config"
	"github.com/crius-run/crius/internal/logx"
	"github.com/crius-run/crius/server/control"
)

func (p *program) wipeCommand() *cobra.Command {
	var yes, keepImages bool
	cmd := &cobra.Command{
		Use:   "wipe",
		Short: "Remove all pods, containers and images, and whatever else crius keeps on this node",
		Long: "Remove all pods and containers, which are killed, give their networks back, and remove the images. " +
			"A running server does it, and serves an empty node afterwards; stop the kubelet first, or it makes its pods anew. " +
			"Where no server runs, the directories of state go as well. What cannot be given back is said, stays on record, and makes the exit status 1.\n\n" +
			"It asks first, and wants yes for an answer.",
		Args: usage(cobra.NoArgs),
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	cmd.Flags().BoolVar(&keepImages, "keep-images", false, "leave the images where they are")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := p.load(cmd)
		if err != nil {
			return err
		}
		// A program that only prints what it was asked for is quiet.
		if err := logTo(cmd.ErrOrStderr(), "error"); err != nil {
			return err
		}
		if err := rootsOf(loaded.Config).ours(); err != nil {
			return err
		}
		if !hasState(loaded.Config) {
			fmt.Fprintf(cmd.OutOrStdout(), "there is no state in %s\n", loaded.Config.Root)
			return nil
		}
		ask := question(cmd.InOrStdin(), cmd.OutOrStdout())
		if yes {
			ask = func(string) error { return nil }
		}
		return wipe(cmd.Context(), loaded.Config, wiping{keepImages, ask, cmd.OutOrStdout()})
	}
	return cmd
}

// wiping is how to wipe.
type wiping struct {
	keepImages bool
	ask        func(about string) error
	out        io.Writer
}

func wipe(ctx context.Context, cfg config.Config, how wiping) (err error) {
	who, release, err := findKeeper(cfg)
	if err != nil {
		return err
	}
	defer closing(&err, release)
	holdings, err := who.Holdings(ctx)
	if err != nil {
		return fmt.Errorf("count what there is: %w", err)
	}
	if err := how.ask(loss(cfg, holdings, how.keepImages)); err != nil {
		return err
	}
	wiped, err := who.Wipe(ctx, how.keepImages)
	if err != nil {
		return err
	}
	for _, f := range wiped.Left {
		fmt.Fprintf(how.out, "left: %s: %s", printable(f.Object), printable(f.Wrong))
		for _, more := range []string{f.Err, f.Advice} {
			if more != "" {
				fmt.Fprintf(how.out, ": %s", printable(more))
			}
		}
		fmt.Fprintln(how.out)
	}
	for _, text := range wiped.Errors {
		fmt.Fprintf(how.out, "left: %s\n", printable(text))
	}
	if !wiped.Done() {
		return fmt.Errorf("not everything is gone; it is on record, and crius wipe tries again")
	}
	return nil
}

// loss is what will be gone, in words.
func loss(cfg config.Config, h control.Holdings, keepImages bool) string {
	mib := func(bytes uint64) float64 { return float64(bytes) / (1 << 20) }
	var b strings.Builder
	fmt.Fprintf(&b, "This removes from the node:\n  pods        %d\n  containers  %d, killed if they run", h.Pods, h.Containers)
	if h.ContainerBytes > 0 {
		fmt.Fprintf(&b, "; they have written %.1f MiB", mib(h.ContainerBytes))
	}
	b.WriteString("\n")
	if !keepImages {
		fmt.Fprintf(&b, "  images      %d, %.1f MiB", h.Images, mib(h.ImageBytes))
		if cfg.Image.Root == "" {
			b.WriteString("; the store is also podman's, skopeo's and buildah's")
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "  state       %s, %s\n", cfg.Root, cfg.RunRoot)
	return b.String()
}

// question asks on a terminal, and is a usageError where there is none.
func question(in io.Reader, out io.Writer) func(string) error {
	return func(about string) error {
		if !isTerminal(in) {
			return usageError{errors.New("there is no terminal to ask on; say --yes to wipe without a question")}
		}
		fmt.Fprintf(out, "%sType yes to go on: ", about)
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

func isTerminal(in io.Reader) bool {
	f, ok := in.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// logTo is where what is not asked for goes.
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

// root is a directory of state.
type root struct {
	path    string
	names   []string // of what crius has in it
	allowed []string // of what else the configuration has put there, which stays
}

// unfinished is what the names of files begin with that a dying server was
// writing.
const unfinished = ".crius-"

// has tells whether a name in the root is ours.
func (r root) has(name string) bool {
	return slices.Contains(r.names, name) || strings.HasPrefix(name, unfinished)
}

type roots []root

func rootsOf(cfg config.Config) roots {
	all := roots{
		{path: cfg.Root, names: []string{"pods", "containers", "pod-cidr", "lock"}}, // held until the end
		{path: cfg.RunRoot, names: []string{"pods", "containers", "runtime", "metrics.sock", "control.sock"}},
	}
	for i := range all {
		r := &all[i]
		for _, socket := range []string{cfg.API.Listen, cfg.API.CrioSocket} {
			if name, below := nameBelow(r.path, socket); below {
				r.names = append(r.names, name, name+".lock")
			}
		}
		for _, place := range []string{cfg.Image.Root, cfg.Image.RunRoot, cfg.Image.TemporaryDir, cfg.Pod.NamespacesDir, cfg.RunRoot, cfg.Root} {
			if name, below := nameBelow(r.path, place); below {
				r.allowed = append(r.allowed, name)
			}
		}
	}
	return all
}

// nameBelow is the name in root by which path is reached.
func nameBelow(root, path string) (string, bool) {
	rest, below := strings.CutPrefix(path, strings.TrimSuffix(root, "/")+"/")
	name, _, _ := strings.Cut(rest, "/")
	return name, below && name != ""
}

// ours refuses roots that have other things in them: somebody has mistaken their
// directory for one of crius.
func (r roots) ours() error {
	var errs []error
	for _, root := range r {
		entries, err := os.ReadDir(root.path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
		var foreign []string
		for _, entry := range entries {
			if !root.has(entry.Name()) && !slices.Contains(root.allowed, entry.Name()) {
				foreign = append(foreign, entry.Name())
			}
		}
		if len(foreign) > 0 {
			errs = append(errs, fmt.Errorf("%s has things that are not of crius, and is not touched: %.200s; correct root or run_root, or move them away",
				root.path, strings.Join(foreign, ", ")))
		}
	}
	return errors.Join(errs...)
}

// remove removes what is ours, and then the roots if that leaves them empty. No
// link is followed out of them.
func (r roots) remove() error {
	var errs []error
	for _, root := range r {
		confined, err := os.OpenRoot(root.path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		entries, err := os.ReadDir(root.path)
		errs = append(errs, err)
		for _, entry := range entries {
			if root.has(entry.Name()) {
				errs = append(errs, confined.RemoveAll(entry.Name()))
			}
		}
		errs = append(errs, confined.Close())
		if err := os.Remove(root.path); err != nil && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EBUSY) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
