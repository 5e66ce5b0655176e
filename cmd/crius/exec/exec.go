// Package exec runs a command in a container, by the name of its pod.
package exec

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/cmd/crius/cli"
)

// options are the flags of crius exec.
type options struct {
	container  string
	stdin, tty bool
	identity   identity
}

// Command is crius exec.
func Command(load cli.Load) *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "exec POD [-c CONTAINER] [-it] -- COMMAND [ARGUMENT]...",
		Short: "Run a command in a container",
		Long: "Run a command in a container of the running server, and exit with its exit code. " + cli.PodNames +
			"; -c may be omitted if the pod has only one container. Of containers with the same name the newest is taken. " +
			"On a terminal, control characters in the output are shown escaped, unless -t is given; a pipe or a file gets them as they are. " +
			"If crius is interrupted, the command may continue to run.",
		Args: cli.Usage(checkArgs),
	}
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if strings.HasPrefix(err.Error(), "unknown ") { // the flag may be one of the command
			err = fmt.Errorf("%w; flags of the command stand after --: %s", err, usage)
		}
		return cli.UsageError{Err: err, Command: cmd.CommandPath()}
	})
	names := cli.CompleteContainer(load)
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 { // the command, which is the container's
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return names(cmd, nil, word)
	}
	cmd.Flags().StringVarP(&o.container, "container", "c", "", "name of the container")
	cli.CompleteBy(cmd, "container", names)
	cmd.Flags().BoolVarP(&o.stdin, "stdin", "i", false, "pass the standard input to the command")
	cmd.Flags().BoolVarP(&o.tty, "tty", "t", false, "run the command on a terminal; the standard input must be one")
	cmd.Flags().StringVar(&o.identity.cert, "tls-cert", "", "PEM file with a client certificate, which the server asks for if api.stream_tls_client_ca_file is set")
	cmd.Flags().StringVar(&o.identity.key, "tls-key", "", "PEM file with the key of that certificate")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		loaded, err := load(cmd)
		if err != nil {
			return err
		}
		streams, err := o.streams(cmd)
		if err != nil {
			return err
		}
		secure, err := o.identity.config(loaded.Config.API.StreamTLSCertFile, loaded.Config.API.StreamTLSClientCAFile)
		if err != nil {
			return err
		}
		url, err := o.prepare(cmd.Context(), loaded.Config.API.Listen, args[0], args[1:])
		if err != nil {
			return err
		}
		err = converse(cmd.Context(), url, secure, streams)
		if err != nil && cmd.Context().Err() != nil {
			return errors.New("interrupted; the command may still be running")
		}
		return err
	}
	return cmd
}

const usage = "crius exec POD -- COMMAND"

// checkArgs requires the two dashes: without them flags of the command would be parsed as
// flags of crius exec.
func checkArgs(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0 || cmd.ArgsLenAtDash() == 0:
		return errors.New("POD is missing: " + usage)
	case cmd.ArgsLenAtDash() != 1:
		return errors.New("name one pod, and put -- before the command: " + usage)
	case len(args) == 1:
		return errors.New("no command after --: " + usage)
	case args[0] == "":
		return errors.New("POD is empty: " + usage)
	case cmd.Flags().Changed("container") && cmd.Flag("container").Value.String() == "":
		return errors.New("--container is empty: " + usage)
	}
	return nil
}

func (o options) streams(cmd *cobra.Command) (streams, error) {
	s := streams{out: cmd.OutOrStdout(), err: cmd.ErrOrStderr()}
	if o.stdin {
		s.in = cmd.InOrStdin()
	}
	if !o.tty {
		s.out, s.err = cli.Shown(s.out), cli.Shown(s.err)
		return s, nil
	}
	terminal, ok := cmd.InOrStdin().(*os.File)
	if !ok || !cli.IsTerminal(terminal) {
		return s, errors.New("-t needs a terminal as standard input: run it on one, or leave -t out")
	}
	s.terminal = terminal
	return s, nil
}

// prepare asks the server for the URL of a session.
func (o options) prepare(ctx context.Context, socket, pod string, command []string) (url string, err error) {
	err = cli.Ask(ctx, socket, func(ctx context.Context, server cli.Server) error {
		id, err := cli.FindContainer(ctx, server, pod, o.container)
		if err != nil {
			return err
		}
		answer, err := server.Exec(ctx, &cri.ExecRequest{
			ContainerId: id, Cmd: command, Stdin: o.stdin, Stdout: true, Stderr: !o.tty, Tty: o.tty,
		})
		url = answer.GetUrl()
		return err
	})
	return url, err
}
