// Command crius is a container runtime for Kubernetes nodes: it serves CRI on a unix socket
// and runs containers with OCI runtimes such as runc and crun.
//
// This package connects the parts: it reads the command line and the configuration, builds
// the backends from the bottom up and stops them again. Most other subcommands only inspect
// a node.
//
// Exit codes: 0 success, 1 failure, 2 invalid command line, 78 invalid configuration of a
// server; crius exec exits with the code of its command.
package main

import (
	"cmp"
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
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/logx"
	"github.com/crius-run/crius/storage"
)

func main() {
	unix.Umask(inherit.Umask)
	if storage.Init() { // containers/storage has started the program again
		return
	}
	os.Exit(runUntilSignal(newRoot()))
}

// runUntilSignal calls run with the process's command line, until a signal ends it.
func runUntilSignal(root *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	return run(ctx, root, os.Args[1:], os.Stdout, os.Stderr)
}

// run executes a command line and returns the exit code.
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

// exitConfig is EX_CONFIG of sysexits.h. The unit does not restart the server after it,
// since a restart does not correct the configuration.
const exitConfig = 78

// configError is an error in the configuration of a server.
type configError struct{ error }

func (e configError) Unwrap() []error { return []error{e.error} }

// report writes an error as one line, or one line for each that was joined.
func report(w io.Writer, err error) {
	hint, priority := "", ""
	if logx.Journal(w) {
		priority = logx.Prefix(slog.LevelError)
	}
	if usage := new(cli.UsageError); errors.As(err, usage) {
		hint = fmt.Sprintf(" (see %s --help)", cmp.Or(usage.Command, "crius"))
	}
	for _, text := range lines(err) {
		fmt.Fprintf(w, "%scrius: %s%s\n", priority, cli.Printable(text+advice(text, os.Geteuid())), hint)
	}
}

// advice says what a user other than root can do about a refused access.
func advice(text string, uid int) string {
	const do = ": run as root"
	if uid == 0 || !strings.Contains(text, unix.EACCES.Error()) || strings.Contains(text, do) {
		return ""
	}
	return do
}

// lines splits joined errors. It does not split other errors that wrap several, which have
// a text of their own.
func lines(err error) []string {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []string{fault.Text(err)}
	}
	var texts, all []string
	for _, part := range joined.Unwrap() {
		texts = append(texts, part.Error())
		all = append(all, lines(part)...)
	}
	if err.Error() != strings.Join(texts, "\n") {
		return []string{fault.Text(err)}
	}
	return all
}
