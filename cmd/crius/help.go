package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
)

// helpWidth is the column at which help is wrapped.
const helpWidth = 100

// printUsage prints the subcommands and flags of cmd. The many flags that set options,
// which every command accepts, have their own page (flagsTopic).
func (p *program) printUsage(cmd *cobra.Command) error {
	var b strings.Builder
	fmt.Fprintf(&b, "Usage:\n  %s\n", cmd.UseLine())
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "  %s [command]\n\nCommands:\n", cmd.CommandPath())
		for _, c := range cmd.Commands() {
			if c.IsAvailableCommand() {
				fmt.Fprintf(&b, "  %-*s %s\n", c.NamePadding(), c.Name(), c.Short)
			}
		}
	}
	flags := pflag.NewFlagSet(cmd.Name(), pflag.ContinueOnError)
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if !p.flags.Has(f.Name) {
			flags.AddFlag(f)
		}
	})
	fmt.Fprintf(&b, "\nFlags:\n%s\n", flagUsages(flags))
	if cmd.HasParent() {
		b.WriteString("Every command also takes the flags --config, --config-dir and those of \"crius help flags\".\n")
	} else {
		b.WriteString("Each key of the configuration has a flag as well, which overrides it: see \"crius help flags\".\n")
	}
	_, err := io.WriteString(cmd.OutOrStderr(), b.String())
	return err
}

// flagsTopic returns the page of `crius help flags`.
func flagsTopic(options *config.Flags) *cobra.Command {
	cmd := &cobra.Command{
		Use:    flagsPage,
		Short:  "The flags that set keys of the configuration",
		Hidden: true, // not a command
	}
	cmd.SetHelpFunc(func(cmd *cobra.Command, _ []string) {
		fmt.Fprintf(cmd.OutOrStdout(), "These flags are taken by every command. Each sets the key of the configuration that has its name,\n"+
			"with dots and underscores instead of dashes, and overrides all files. The flag of a list takes one item:\n"+
			"repeat it for several items, pass it empty for none.\n\n%s",
			flagUsages(options.Set()))
	})
	return cmd
}

// flagUsages lists flags. The values of a bool go without saying.
func flagUsages(flags *pflag.FlagSet) string {
	const values = "[=true|false]"
	return strings.ReplaceAll(flags.FlagUsagesWrapped(helpWidth), values, strings.Repeat(" ", len(values)))
}

// helpCommand is crius help, which fails for what does not exist.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Show the help of a command; flags: of the flags that set options",
		Args:  cli.Operands,
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			var names []string
			for _, c := range cmd.Root().Commands() {
				if len(args) == 0 && (c.IsAvailableCommand() || c.Name() == flagsPage) {
					names = append(names, c.Name())
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, c := range cmd.Root().Commands() {
				if len(args) > 0 && c.Name() == args[0] {
					return c.Help()
				}
			}
			if len(args) > 0 {
				return cli.UsageError{Err: fmt.Errorf("no help for %q: crius help lists the commands, crius help %s the flags that set options", args[0], flagsPage)}
			}
			return cmd.Root().Help()
		},
	}
}

// flagsPage is the page on the flags that set options.
const flagsPage = "flags"
