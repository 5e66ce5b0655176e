package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/cmd/crius/config/foreign"
	"github.com/crius-run/crius/cmd/crius/switchover"
)

// Default paths of the configurations of other runtimes.
const (
	crioDir        = "/etc/crio"
	containerdFile = "/etc/containerd/config.toml"
)

func (p *program) configCommand() *cobra.Command {
	var template bool
	var from importFlags
	cmd := &cobra.Command{
		Use:   "config [PATH]",
		Short: "Print the effective configuration and the origin of each value",
		Long: "Print the configuration that crius would use: defaults, configuration file, drop-ins and flags merged, " +
			"with the origin of each value in a comment. The output is itself a valid configuration file.\n\n" +
			"With --from-crio or --from-containerd, print the configuration file that makes crius do what CRI-O or containerd does on this node. " +
			"Comments give the origin of each value and explain what it means for the node if a key has no equivalent in crius. " +
			"PATH is the directory or file of CRI-O (default " + crioDir + ") or the file of containerd (default " + containerdFile + ").",
		Args: cli.Operands,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := from.check(args, "--default", template); err != nil {
				return cli.UsageError{Err: err, Command: cmd.CommandPath()}
			}
			switch {
			case template:
				return config.WriteTemplate(cmd.OutOrStdout())
			case from.any():
				return from.write(cmd.OutOrStdout(), args)
			}
			loaded, err := p.load(cmd)
			if err != nil {
				return err
			}
			return loaded.Write(cmd.OutOrStdout())
		},
	}
	cmd.Flags().BoolVar(&template, "default", false, "print a commented configuration file with all keys and their defaults instead")
	from.add(cmd, "print a configuration file made from that of %s instead")
	cmd.Flags().StringArrayVar(&from.accept, "accept", nil, "with --from-crio or --from-containerd: accept that a key which restricts pods or clients is lost; without it such a key is an error (repeatable)")
	return cmd
}

// importFlags select the runtime whose configuration is read.
type importFlags struct {
	crio, containerd bool
	accept           []string // keys that restrict and may be lost
}

func (f importFlags) any() bool { return f.crio || f.containerd }

// add adds the flags to a command. help is a format for the name of the runtime.
func (f *importFlags) add(cmd *cobra.Command, help string) {
	for _, of := range []struct {
		flag, program string
		set           *bool
	}{{"from-crio", "CRI-O", &f.crio}, {"from-containerd", "containerd", &f.containerd}} {
		cmd.Flags().VarPF(switchFlag{of.set, of.flag}, of.flag, "", fmt.Sprintf(help, of.program)).NoOptDefVal = "true"
	}
}

// switchFlag is a flag that is set or not, and says so if it is given a path.
type switchFlag struct {
	set  *bool
	name string
}

// Set implements pflag.Value.
func (f switchFlag) Set(text string) (err error) {
	if *f.set, err = strconv.ParseBool(text); err != nil {
		return fmt.Errorf("it takes no value; the path is an argument of its own: --%s %s", f.name, text)
	}
	return nil
}

func (f switchFlag) String() string { return strconv.FormatBool(f.set != nil && *f.set) }

// Type implements pflag.Value.
func (f switchFlag) Type() string { return "bool" }

// check refuses both flags at once, either with the other flag, and a path without either.
func (f importFlags) check(args []string, other string, set bool) error {
	switch {
	case f.crio && f.containerd, f.any() && set:
		return fmt.Errorf("%s, --from-crio and --from-containerd are mutually exclusive", other)
	case len(f.accept) > 0 && !f.any():
		return errors.New("--accept is for --from-crio and --from-containerd")
	case len(args) > 0 && !f.any():
		return fmt.Errorf("unexpected argument %q: only --from-crio and --from-containerd take a path", args[0])
	}
	return nil
}

// read reads the configuration at the path in args, or at its default path.
func (f importFlags) read(args []string) (*foreign.Import, error) {
	read, path := foreign.CRIO, crioDir
	if f.containerd {
		read, path = foreign.Containerd, containerdFile
	}
	if len(args) > 0 {
		path = args[0]
	}
	return read(path)
}

func (f importFlags) write(w io.Writer, args []string) error {
	imp, err := f.read(args)
	if err != nil {
		return err
	}
	return config.WriteImport(w, imp, f.accept)
}

// compare reports what would change if crius replaced the other runtime.
func (f importFlags) compare(ctx context.Context, args []string, n *node) ([]finding, error) {
	imp, err := f.read(args)
	if err != nil {
		return nil, err
	}
	all, err := switchover.Checks(imp, n.config, n.host.root)
	if err != nil {
		return nil, err
	}
	var checks []check
	for _, c := range all {
		checks = append(checks, check{c.Name, c.Run})
	}
	return runChecks(ctx, checks), nil
}
