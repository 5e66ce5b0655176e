package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/checkpoint"
	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/cmd/crius/exec"
	"github.com/crius-run/crius/cmd/crius/images"
	"github.com/crius-run/crius/cmd/crius/lists"
	"github.com/crius-run/crius/cmd/crius/logs"
	"github.com/crius-run/crius/cmd/crius/pulls"
	"github.com/crius-run/crius/cmd/crius/top"
	"github.com/crius-run/crius/internal/logx"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/server/stream"
)

// program is shared by the subcommands: it has the sources of the configuration.
type program struct {
	file, dir string
	flags     *config.Flags
	hook      trace.Hook // of the server; tests inject failures there
}

// newRoot returns the command line of crius.
func newRoot() *cobra.Command { return (&program{}).root() }

func (p *program) root() *cobra.Command {
	var version bool
	root := &cobra.Command{
		Use:   "crius",
		Short: "Container runtime for Kubernetes nodes",
		Long: "crius serves the Container Runtime Interface (CRI) on a unix socket and runs containers with OCI runtimes " +
			"such as runc and crun. Without a command it serves.\n\n" +
			"Containers keep running while the server is stopped; the next server takes them over.",
		Args: cli.Usage(func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return fmt.Errorf("unknown command %q%s", args[0], suggestion(cmd, args[0]))
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			if version {
				return printVersion(cmd.OutOrStdout())
			}
			return p.serve(cmd, args)
		},
		SilenceUsage:               true,
		SilenceErrors:              true,
		SuggestionsMinimumDistance: 2,
		CompletionOptions:          cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	flags := root.PersistentFlags()
	flags.StringVar(&p.file, "config", config.DefaultFile, "configuration file; must exist if given")
	flags.StringVar(&p.dir, "config-dir", "", "directory of drop-in files; must exist if given (default: the configuration file's name with .d)")
	root.Flags().BoolVar(&version, "version", false, "print the versions of crius and of the libraries it is built with")
	p.flags = config.AddFlags(flags)
	for name, values := range p.flags.Choices() {
		cli.Complete(root, name, values)
	}
	root.SetUsageFunc(p.printUsage)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return cli.UsageError{Err: err, Command: cmd.CommandPath()} })
	root.SetHelpCommand(helpCommand())
	root.AddCommand(p.serveCommand(), p.statusCommand(), p.eventsCommand(), pulls.PullCommand(p.loadForClient), pulls.Command(p.loadForClient), checkpoint.Command(p.loadForClient), checkpoint.RestoreCommand(p.loadForClient), logs.Command(p.loadForClient), exec.Command(p.loadForClient), top.Command(p.loadForClient), images.Command(p.loadForClient), lists.PodsCommand(p.loadForClient), lists.ContainersCommand(p.loadForClient), p.configCommand(), p.reloadCommand(), p.checkCommand(), p.debugCommand(), p.wipeCommand(), versionCommand(), completionCommand(), generateCommand(), flagsTopic(p.flags))
	cli.CompleteNothing(root)
	return root
}

// load reads the configuration that the command line selects.
func (p *program) load(cmd *cobra.Command) (*config.Loaded, error) {
	return config.Load(p.sources(cmd))
}

// loadForClient is load for commands that only ask a running server. The server keeps its
// configuration even if the files are broken now, so the valid part of them, with a
// warning, is enough to find it.
func (p *program) loadForClient(cmd *cobra.Command) (*config.Loaded, error) {
	loaded, err := config.LoadPart(p.sources(cmd))
	problem := new(config.Problem)
	if err == nil || loaded == nil || !errors.As(err, &problem) {
		return loaded, err
	}
	c := loaded.Config
	fmt.Fprintf(cmd.ErrOrStderr(), "crius: warning: invalid configuration (%s); using api.listen = %s (%s), run_root = %s (%s); override with --api-listen and --run-root\n",
		cli.Printable(problem.Error()), cli.Printable(c.API.Listen), cli.Printable(loaded.Origin("api.listen")), cli.Printable(c.RunRoot), cli.Printable(loaded.Origin("run_root")))
	return loaded, nil
}

func (p *program) sources(cmd *cobra.Command) config.Sources {
	s := config.Sources{
		File:      p.file,
		FileNamed: cmd.Flags().Changed("config"),
		Dir:       p.dir,
		DirNamed:  cmd.Flags().Changed("config-dir"),
		Flags:     p.flags,
	}
	if !s.DirNamed {
		s.Dir = p.file + ".d"
	}
	return s
}

// reloaded describes the effect of SIGHUP.
func reloaded() string {
	return "Most options take effect at once, for pods, containers, pulls and sessions that begin afterwards; what runs keeps what it began with. " +
		"Options of which crius.toml(5) says that they need a restart are logged, and wait for it. An invalid configuration is rejected as a whole."
}

func (p *program) serveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "serve",
		Short: "Serve CRI (the default without a command)",
		Long: "Serve CRI until SIGTERM or SIGINT, then finish the requests in progress and exit; containers keep running. " +
			"A second signal ends the server at once, which does not harm containers either.\n\n" +
			"SIGHUP reloads the configuration: " + reloaded(),
		Args: cli.Operands,
		RunE: p.serve,
	}
}

func (p *program) serve(cmd *cobra.Command, _ []string) error {
	if err := joinMountNamespace(); err != nil {
		return err
	}
	loaded, err := p.load(cmd)
	if err != nil {
		return configError{err}
	}
	atFirst, err := logx.Level(loaded.Config.LogLevel)
	if err != nil {
		return err
	}
	level := new(slog.LevelVar)
	level.Set(atFirst)
	logger, err := logx.New(cmd.ErrOrStderr(), loaded.Config.LogFormat, level)
	if err != nil {
		return err
	}
	slog.SetDefault(logger)
	stream.LogTo(logger)
	return serve(cmd.Context(), &settings{
		load:    func() (*config.Loaded, error) { return p.load(cmd) },
		level:   level,
		inForce: loaded,
	}, p.hook)
}

// completions write the completion script, by shell.
var completions = map[string]func(*cobra.Command, io.Writer) error{
	"bash": func(root *cobra.Command, w io.Writer) error { return root.GenBashCompletionV2(w, true) },
	"zsh":  (*cobra.Command).GenZshCompletion,
	"fish": func(root *cobra.Command, w io.Writer) error { return root.GenFishCompletion(w, true) },
}

func completionCommand() *cobra.Command {
	names := []string{"bash", "zsh", "fish"}
	return &cobra.Command{
		Use:       "completion " + strings.Join(names, "|"),
		Short:     "Print the completion script for a shell",
		Long:      "Print the script that completes commands, flags and their values. The packages install it; by hand: source <(crius completion bash).",
		ValidArgs: names,
		Args: cobra.MatchAll(cli.Operands, cli.Usage(func(_ *cobra.Command, args []string) error {
			if !slices.Contains(names, args[0]) {
				return fmt.Errorf("no completion for %q: must be bash, zsh or fish", args[0])
			}
			return nil
		})),
		RunE: func(cmd *cobra.Command, args []string) error {
			return completions[args[0]](cmd.Root(), cmd.OutOrStdout())
		},
	}
}

// crictlVerbs are what people who know other command lines try here; crictl does it.
var crictlVerbs = map[string]string{
	"attach": "attach", "create": "create", "info": "info", "inspect": "inspect", "inspecti": "inspecti", "inspectp": "inspectp",
	"kill": "stop", "port-forward": "port-forward", "rm": "rm", "rmi": "rmi", "rmp": "rmp", "run": "run", "runp": "runp",
	"start": "start", "stats": "stats", "stop": "stop", "stopp": "stopp", "update": "update",
}

// suggestion names the command that was meant: the one that is nearest, of crius or of crictl.
func suggestion(cmd *cobra.Command, name string) string {
	if verb, ok := crictlVerbs[name]; ok {
		return fmt.Sprintf(": that is for crictl %s", verb)
	}
	if verb, ok := map[string]string{"list": "pods or ps", "ls": "pods or ps", "image": "images", "log": "logs", "pod": "pods", "container": "ps", "containers": "ps"}[name]; ok {
		return fmt.Sprintf("; did you mean %s?", verb)
	}
	near := cmd.SuggestionsFor(name)
	slices.SortStableFunc(near, func(a, b string) int { return cmp.Compare(common(b, name), common(a, name)) })
	if len(near) > 0 {
		return fmt.Sprintf("; did you mean %s?", near[0])
	}
	return ""
}

// common is the length of the beginning that two words share.
func common(a, b string) (n int) {
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}
