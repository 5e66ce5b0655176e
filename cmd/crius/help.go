package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

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
	fmt.Fprintf(&b, "\nFlags:\n%s\n", flags.FlagUsagesWrapped(helpWidth))
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
		Use:    "flags",
		Short:  "The flags that set keys of the configuration",
		Hidden: true, // not a command
	}
	cmd.SetHelpFunc(func(cmd *cobra.Command, _ []string) {
		fmt.Fprintf(cmd.OutOrStdout(), "These flags are taken by every command. Each sets the key of the configuration that has its name,\n"+
			"with dots and underscores instead of dashes, and overrides all files. The flag of a list takes one item:\n"+
			"repeat it for several items, pass it empty for none.\n\n%s",
			options.Set().FlagUsagesWrapped(helpWidth))
	})
	return cmd
}
