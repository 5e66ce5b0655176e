// Package cli is what the subcommands of crius share: how they take their arguments, ask
// a running server, name pods and containers, and print.
package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/config"
)

// Load reads the configuration that a command line asks for.
type Load func(*cobra.Command) (*config.Loaded, error)

// UsageError is a command line that makes no sense.
type UsageError struct{ Err error }

func (e UsageError) Error() string { return e.Err.Error() }
func (e UsageError) Unwrap() error { return e.Err }

// Exit is the exit code of a command in a container that failed. The command has reported
// itself why: crius adds nothing and exits with the same code.
type Exit int

func (e Exit) Error() string { return fmt.Sprintf("command ended with exit code %d", int(e)) }

// Usage makes what a command says about its arguments a UsageError.
func Usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return UsageError{err}
		}
		return nil
	}
}

// Complete has shells complete the values of a flag, which must exist.
func Complete(cmd *cobra.Command, flag string, values []string) {
	// The only error is a flag that does not exist or is completed already.
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err)
	}
}
