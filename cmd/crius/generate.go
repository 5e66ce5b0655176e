package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
)

// generated returns the writers, by path, of the files of the repository that are generated
// from the command line and the configuration.
func generated(root *cobra.Command) map[string]func(io.Writer) error {
	completion := func(shell string) func(io.Writer) error {
		return func(w io.Writer) error { return completions[shell](root, w) }
	}
	return map[string]func(io.Writer) error{
		"completions/crius.bash": completion("bash"),
		"completions/_crius":     completion("zsh"),
		"completions/crius.fish": completion("fish"),
		"contrib/crius.toml":     config.WriteTemplate,
		"docs/man/crius.8":       func(w io.Writer) error { return writeProgramPage(w, root) },
		"docs/man/crius.toml.5":  writeConfigPage,
	}
}

func generateCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "generate DIRECTORY",
		Short:  "Write completions, manual pages and the sample configuration below a directory",
		Args:   cli.Operands,
		Hidden: true, // for `make generate`
		RunE: func(cmd *cobra.Command, args []string) error {
			for path, write := range generated(cmd.Root()) {
				if err := writeFile(filepath.Join(args[0], path), write); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

func writeFile(path string, write func(io.Writer) error) error {
	var b bytes.Buffer
	if err := write(&b); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}
