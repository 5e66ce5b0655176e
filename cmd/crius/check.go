package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/cmd/crius/diagnosis"
)

// A check looks at one requirement of the node. It is safe while a server is running.
type check struct {
	name string
	run  func(context.Context) []finding
}

// node is the subject of checks.
type node struct {
	config *config.Loaded
	host   host

	flags []string // of the running server, whose values config has
}

// The result of a check.
type (
	finding = diagnosis.Finding
	status  = diagnosis.Status
)

const (
	statusOK   = diagnosis.StatusOK
	statusWarn = diagnosis.StatusWarn
	statusFail = diagnosis.StatusFail
)

func ok(format string, args ...any) finding       { return diagnosis.OK(format, args...) }
func warn(do, format string, args ...any) finding { return diagnosis.Warn(do, format, args...) }
func fail(do, format string, args ...any) finding { return diagnosis.Fail(do, format, args...) }

// checks lists all checks of the node, in the order in which an operator would fix things.
func (n *node) checks() []check {
	return []check{
		{"configuration", n.checkConfiguration},
		{"privileges", n.checkPrivileges},
		{"kernel", n.checkKernel},
		{"confinement", n.checkConfinement},
		{"cgroups", n.checkCgroups},
		{"limits", checkLimits},
		{"directories", n.checkDirectories},
		{"socket", n.checkSocket},
		{"server", n.checkServer},
		{"identity", n.checkIdentity},
		{"addresses", n.checkAddresses},
		{"runtimes", n.checkRuntimes},
		{"checkpoints", n.checkCheckpoints},
		{"hooks", n.checkHooks},
		{"resource classes", n.checkClasses},
		{"storage", n.checkStorage},
		{"layer sizes", n.checkLayerSizes},
		{"pulls", checkUnpacker},
		{"registries", n.checkRegistries},
		{"other runtimes", n.checkForeign},
		{"network", n.checkNetwork},
		{"metrics", n.checkMetrics},
	}
}

// checkTimeout bounds one check: a preflight must not hang where a node does.
const checkTimeout = 30 * time.Second

// runChecks runs all checks one after the other.
func runChecks(ctx context.Context, all []check) []finding {
	var findings []finding
	for _, c := range all {
		ctx, cancel := context.WithTimeout(ctx, checkTimeout)
		for _, f := range c.run(ctx) {
			f.Check = c.name
			findings = append(findings, f)
		}
		cancel()
	}
	return findings
}

func (p *program) checkCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check [PATH]",
		Short: "Check that this node meets the requirements of crius and its pods, and that its state matches crius's records",
		Long: "Check that this node meets the requirements of crius and its pods under the current configuration, and say how to fix what is missing. " +
			"If a server is running, report its runtime conditions. " +
			"Then compare the records with the node: pods with their namespaces, networks, addresses and host ports, containers with their monitors, cgroups, root file systems and images; " +
			"and search for orphans: objects that are named like crius's own but have no record. It is safe to run while a server is running: objects that are being created or removed are not reported.\n\n" +
			"Nothing is changed, except that a missing image store is created. With --repair, problems are fixed the same way that stopping or removing the pod, or restarting the server, would fix them: " +
			"a pod that lost something essential is stopped, so that the kubelet creates it again; orphans are removed. " +
			"The exit status is 1 if crius would not start, no pod could run, or a problem remains.\n\n" +
			"With --from-crio or --from-containerd, check instead what would change if crius, with its current configuration, replaced that runtime on this node: " +
			"settings without a counterpart or with another value, handlers, cgroup driver, pod network, the kubelet's endpoint, missing files. " +
			"The other runtime's configuration files are read, and not the flags of its service. " +
			"PATH is the directory or file of CRI-O (default " + crioDir + ") or the file of containerd (default " + containerdFile + "). " +
			"The exit status is 1 if pods that run now would not run.",
		Args: cli.Operands,
	}
	var repair bool
	var from importFlags
	cmd.Flags().BoolVar(&repair, "repair", false, "fix what does not match the records")
	from.add(cmd, "check what would change if crius replaced %s on this node")
	format := cli.FormatFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := from.check(args, "--repair", repair); err != nil {
			return cli.UsageError{Err: err, Command: cmd.CommandPath()}
		}
		loaded, err := p.load(cmd)
		if err != nil {
			return err
		}
		// Findings report the problems, so warnings in the log are not needed.
		if err := logTo(cmd.ErrOrStderr(), "error"); err != nil {
			return err
		}
		n := &node{config: loaded, host: host{"/"}}
		var findings []finding
		if from.any() {
			findings, err = from.compare(cmd.Context(), args, n)
		} else {
			findings = n.findings(cmd.Context(), repair)
		}
		if err != nil {
			return err
		}
		err = format.Print(cmd.OutOrStdout(), findings, func(w io.Writer) { writeFindings(w, findings) })
		return cmp.Or(err, verdict(findings))
	}
	return cmd
}

// findings are those of all checks. A user who is not root learns only that: what else fails then says
// nothing about the node.
func (n *node) findings(ctx context.Context, repair bool) []finding {
	uid := os.Geteuid()
	if uid != 0 {
		return runChecks(ctx, n.checksFor(uid))
	}
	n.askServer(ctx)
	return append(runChecks(ctx, n.checksFor(uid)), checkNode(ctx, n.config.Config, repair)...)
}

func (n *node) checksFor(uid int) []check {
	if uid == 0 {
		return n.checks()
	}
	return []check{{"privileges", func(context.Context) []finding {
		return []finding{fail("run as root", "running as user id %d, not as root: the other checks would blame the node", uid)}
	}}}
}

// writeFindings writes a table for people.
func writeFindings(w io.Writer, findings []finding) {
	last := ""
	for _, f := range findings {
		name := f.Check
		if name == last {
			name = ""
		}
		last = f.Check
		fmt.Fprintf(w, "%-5s %-14s %s\n", f.Status, name, cli.Printable(f.Text))
		if f.Do != "" {
			fmt.Fprintf(w, "%-5s %-14s -> %s\n", "", "", cli.Printable(f.Do))
		}
	}
}

// verdict returns an error if crius cannot work, or if the node does not match the records.
func verdict(findings []finding) error {
	failed, wrong := 0, 0
	for _, f := range findings {
		switch {
		case f.Status != statusFail:
		case f.Check == nodeCheck:
			wrong++
		default:
			failed++
		}
	}
	switch {
	case failed+wrong == 0:
		return nil
	case failed == 0:
		return fmt.Errorf("this node's state does not match crius's records: %s", findingsThatFail(wrong))
	}
	return fmt.Errorf("this node is not ready: %s", findingsThatFail(failed+wrong))
}

func findingsThatFail(n int) string {
	return counted(n, "failed check listed above", "failed checks listed above")
}
