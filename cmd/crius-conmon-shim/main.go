// Command crius-conmon-shim replaces a runtime's command line for crius-conmon if the
// runtime is a containerd shim: it creates and starts a container, and reports how the
// container ended. It is not for use by hand. Package conmon/shim documents the protocol.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"syscall"

	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/internal/inherit"
)

// arguments are the arguments of all verbs.
type arguments struct {
	program  shim.Program
	runc     bool
	guest    bool
	options  list
	pidFile  string
	stdin    bool
	terminal bool
	// Shims add these when they run their publisher.
	topic, namespace string
}

// list is a flag that can be repeated.
type list []string

func (l *list) String() string         { return fmt.Sprint(*l) }
func (l *list) Set(value string) error { *l = append(*l, value); return nil }

var errUsage = errors.New("usage: crius-conmon-shim create|start|wait|publish FLAGS ID\n" +
	"Internal helper of crius, which starts it for each container run by a containerd shim; do not run it by hand")

func main() {
	syscall.Umask(inherit.Umask)
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "crius-conmon-shim:", err)
		if errors.Is(err, errUsage) {
			os.Exit(2)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	var a arguments
	flags := flag.NewFlagSet("crius-conmon-shim", flag.ContinueOnError)
	flags.SetOutput(new(nothing))
	flags.StringVar(&a.program.Path, "shim", "", "")
	flags.StringVar(&a.program.Dir, "dir", "", "")
	flags.StringVar(&a.program.Server, "address", "", "")
	flags.BoolVar(&a.runc, "runc", false, "")
	flags.BoolVar(&a.guest, "guest", false, "")
	flags.BoolVar(&a.program.Older, "older", false, "")
	flags.Var(&a.options, "option", "")
	flags.StringVar(&a.pidFile, "pid-file", "", "")
	flags.BoolVar(&a.stdin, "stdin", false, "")
	flags.BoolVar(&a.terminal, "terminal", false, "")
	flags.StringVar(&a.topic, "topic", "", "")
	flags.StringVar(&a.namespace, "namespace", "", "")
	verb := ""
	// Shims put the verb of their publisher between its flags.
	for rest := args; len(rest) > 0; rest = flags.Args() {
		if err := flags.Parse(rest); err != nil {
			return fmt.Errorf("%w: %w", err, errUsage)
		}
		if flags.NArg() == 0 {
			break
		}
		if verb == "" {
			verb = flags.Arg(0)
		} else {
			a.program.ID = flags.Arg(0)
		}
		if rest = flags.Args()[1:]; len(rest) == 0 {
			break
		}
		if err := flags.Parse(rest); err != nil {
			return fmt.Errorf("%w: %w", err, errUsage)
		}
	}
	if verb == "publish" {
		return publish(a.topic, os.Stdin)
	}
	p := &a.program
	if p.ID == "" || p.Dir == "" || p.Path == "" && verb != "start" {
		return errUsage
	}
	var err error
	if p.Publisher, err = os.Executable(); err != nil {
		return err
	}
	if p.Options, err = shim.Options(a.runc, a.options); err != nil {
		return fmt.Errorf("options of the runtime handler: %w", err)
	}
	switch verb {
	case "create":
		return a.create(ctx)
	case "start":
		return start(ctx, a.program)
	case "wait":
		return wait(ctx, a.program, a.stdin)
	}
	return errUsage
}

type nothing struct{}

func (*nothing) Write(p []byte) (int, error) { return len(p), nil }
