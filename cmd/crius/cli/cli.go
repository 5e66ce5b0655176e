// Package cli has the code that the subcommands of crius share: they parse arguments, ask a
// running server, name pods and containers, and print with it.
package cli

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/config"
)

// Load reads the configuration that a command line asks for.
type Load func(*cobra.Command) (*config.Loaded, error)

// UsageError is an invalid command line.
type UsageError struct {
	Err     error
	Command string // whose help says what is valid
}

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
			return UsageError{err, cmd.CommandPath()}
		}
		return nil
	}
}

// Operands checks the number of arguments by the usage line of the command: NAME is required,
// [NAME] is optional. The error names what is missing.
func Operands(cmd *cobra.Command, args []string) error {
	all := strings.Fields(cmd.Use)[1:]
	required := slices.DeleteFunc(slices.Clone(all), func(name string) bool { return strings.HasPrefix(name, "[") })
	usage := strings.Join(append([]string{cmd.CommandPath()}, all...), " ")
	switch {
	case len(args) < len(required):
		return UsageError{fmt.Errorf("%s is missing: %s", required[len(args)], usage), cmd.CommandPath()}
	case len(all) == 0 && len(args) > 0:
		return UsageError{fmt.Errorf("unexpected argument %q: %s takes none", args[0], usage), cmd.CommandPath()}
	case len(args) > len(all):
		return UsageError{fmt.Errorf("unexpected argument %q: %s", args[len(all)], usage), cmd.CommandPath()}
	case slices.Contains(args, ""):
		return UsageError{fmt.Errorf("%s is empty: %s", strings.Trim(all[slices.Index(args, "")], "[]"), usage), cmd.CommandPath()}
	}
	return nil
}

// CompleteNothing keeps shells from offering names of files to the commands below cmd that take no
// arguments.
func CompleteNothing(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		if c.ValidArgsFunction == nil && len(c.ValidArgs) == 0 && len(strings.Fields(c.Use)) == 1 {
			c.ValidArgsFunction = cobra.NoFileCompletions
		}
		CompleteNothing(c)
	}
}

// Complete lets shells complete the values of a flag, which must exist.
func Complete(cmd *cobra.Command, flag string, values []string) {
	CompleteBy(cmd, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

// CompleteBy is Complete for values that a function finds.
func CompleteBy(cmd *cobra.Command, flag string, values cobra.CompletionFunc) {
	// The only error is a flag that does not exist or is completed already.
	if err := cmd.RegisterFlagCompletionFunc(flag, values); err != nil {
		panic(err)
	}
}
