// Command crius is a container runtime for Kubernetes nodes: it serves CRI on a
// unix socket and runs containers with OCI runtimes such as runc and crun.
//
// This package is the wiring: it reads the command line and the configuration,
// builds the backends below from top to bottom and stops them again. Its other
// subcommands look at a node and print, and change nothing.
//
// Exit codes: 0 done, 1 something failed, 2 the command line makes no sense, 78 a
// server does not start with its configuration; crius exec ends with its command's.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/logx"
	"github.com/crius-run/crius/storage"
)

func main() {
	unix.Umask(inherit.Umask)
	if storage.Init() { // started again by containers/storage, not by a person
		return
	}
	os.Exit(runUntilSignal(newRoot()))
}

// runUntilSignal is run for the process's own command line.
func runUntilSignal(root *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	return run(ctx, root, os.Args[1:], os.Stdout, os.Stderr)
}

// run is the program without its process: it returns the exit code.
func run(ctx context.Context, root *cobra.Command, args []string, stdout, stderr io.Writer) int {
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if exit := cli.Exit(0); errors.As(err, &exit) {
		return int(exit)
	}
	report(stderr, err)
	switch {
	case err == nil:
		return 0
	case errors.As(err, new(cli.UsageError)):
		return 2
	case errors.As(err, new(configError)):
		return exitConfig
	}
	return 1
}

// exitConfig is EX_CONFIG of sysexits.h. The unit does not start the server again
// after it: no repetition corrects a file.
const exitConfig = 78

// configError is a configuration with which the server does not start.
type configError struct{ error }

func (e configError) Unwrap() []error { return []error{e.error} }

// report writes an error as one line, or one line for each that was joined.
func report(w io.Writer, err error) {
	hint, priority := "", ""
	if logx.Journal(w) {
		priority = logx.Prefix(slog.LevelError)
	}
	if errors.As(err, new(cli.UsageError)) {
		hint = " (see crius --help)"
	}
	for _, text := range lines(err) {
		fmt.Fprintf(w, "%scrius: %s%s\n", priority, cli.Printable(text), hint)
	}
}

// lines takes joined errors apart again. Other errors that wrap several have a
// text of their own, which is not the parts on a line each.
func lines(err error) []string {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []string{err.Error()}
	}
	var texts, all []string
	for _, part := range joined.Unwrap() {
		texts = append(texts, part.Error())
		all = append(all, lines(part)...)
	}
	if err.Error() != strings.Join(texts, "\n") {
		return []string{err.Error()}
	}
	return all
}
