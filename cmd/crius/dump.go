package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/server/control"
)

// stacksFile is the file that SIGUSR1 writes in the run root. Each signal replaces it, so
// that signals cannot fill the file system.
const stacksFile = "goroutines.txt"

// saveStacks writes the stacks of all goroutines to a file that only root can read.
func saveStacks(ctx context.Context, runRoot string) {
	path := filepath.Join(runRoot, stacksFile)
	if err := replace(path, control.Goroutines()); err != nil {
		slog.ErrorContext(ctx, "cannot save the stacks of goroutines", "err", err)
		return
	}
	slog.InfoContext(ctx, "stacks of goroutines saved", "file", path)
}

// replace replaces a file by a new one, so that readers of the old one are not disturbed.
func replace(path string, data []byte) error {
	unfinished := filepath.Join(filepath.Dir(path), unfinished+filepath.Base(path))
	if err := os.Remove(unfinished); err != nil && !os.IsNotExist(err) {
		return err
	}
	f, err := os.OpenFile(unfinished, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	closing(&err, f.Close)
	if err != nil {
		return err
	}
	return os.Rename(unfinished, path)
}

// dumpCommands are the subcommands of crius status.
func (p *program) dumpCommands() []*cobra.Command {
	command := func(use, short, long string, dump func(*control.Client, context.Context, io.Writer) error) *cobra.Command {
		return &cobra.Command{
			Use: use, Short: short, Long: long,
			Args: cli.Operands,
			RunE: func(cmd *cobra.Command, _ []string) error {
				loaded, err := p.loadForClient(cmd)
				if err != nil {
					return err
				}
				return dump(control.NewClient(controlSocket(loaded.Config)), cmd.Context(), cmd.OutOrStdout())
			},
		}
	}
	cpu := &cobra.Command{
		Use: "cpu SECONDS", Short: "Write a profile of the server's CPU time to standard output",
		Long: fmt.Sprintf("Have the running server take a profile of its CPU time for that many seconds, 1 to %d, and write it to standard output, "+
			"as a compressed pprof file: crius status cpu 30 > cpu.pb.gz; go tool pprof -top cpu.pb.gz. The server works as usual meanwhile. Requires root.",
			int(control.MaxCPUProfile.Seconds())),
		Args: cli.Operands,
		RunE: func(cmd *cobra.Command, args []string) error {
			seconds, err := strconv.Atoi(args[0])
			if err != nil || seconds < 1 || seconds > int(control.MaxCPUProfile.Seconds()) {
				return cli.UsageError{Err: fmt.Errorf("SECONDS must be a number from 1 to %d, got %q", int(control.MaxCPUProfile.Seconds()), args[0]), Command: cmd.CommandPath()}
			}
			loaded, err := p.loadForClient(cmd)
			if err != nil {
				return err
			}
			return control.NewClient(controlSocket(loaded.Config)).CPU(cmd.Context(), seconds, cmd.OutOrStdout())
		},
	}
	return []*cobra.Command{
		cpu,
		command("goroutines", "Print the stacks of the server's goroutines",
			"Print the stacks of all goroutines of the running server, with how long each has been waiting, to show in a bug report where the server hangs. "+
				"While the server is starting or does not answer, send it SIGUSR1 instead. Requires root.",
			(*control.Client).Goroutines),
		command("heap", "Write a profile of the server's heap to standard output",
			"Write a profile of the heap of the running server to standard output, as a compressed pprof file: crius status heap > heap.pb.gz; go tool pprof -top heap.pb.gz. Requires root.",
			(*control.Client).Heap),
	}
}
