// Package cli has the code that the subcommands of crius share: they parse arguments, ask a
// running server, name pods and containers, and print with it.
package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/config"
)

// Load reads the configuration that a command line asks for.
type Load func(*cobra.Command) (*config.Loaded, error)

// UsageError is an invalid command line.
type UsageError struct{ Err error }

func (e UsageError) Error() string { return e.Err.Error() }
func (e UsageError) Unwrap() error { return e.Err }

// Exit is the exit code of a command that failed in a container. The command has reported
// the reason itself: crius adds nothing and exits with the same code.
type Exit int

func (e Exit) Error() string { return fmt.Sprintf("command ended with exit code %d", int(e)) }

// Usage turns the error of check into a UsageError.
func Usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return UsageError{err}
		}
		return nil
	}
}

// Complete lets shells complete the values of a flag, which must exist.
func Complete(cmd *cobra.Command, flag string, values []string) {
	// The only error is a flag that does not exist or is completed already.
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err)
	}
}
