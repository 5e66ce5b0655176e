package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/crius-run/crius/internal/config"
)

// A check looks at one thing that a node needs. It harms nothing and is safe
// beside a running server.
type check struct {
	name string
	run  func(ctx context.Context, n *node) []finding
}

// node is what checks look at.
type node struct {
	config *config.Loaded
	host   host
}

// finding is what a check has to say about one object.
type finding struct {
	Check  string `json:"check"`
	Status status `json:"status"`
	Text   string `json:"text"`         // what is the case
	Do     string `json:"do,omitempty"` // what to do about it
}

type status string

const (
	statusOK   status = "ok"
	statusWarn status = "warn" // crius works, something that pods may want does not
	statusFail status = "FAIL" // crius does not start, or no pod does
)

func ok(format string, args ...any) finding {
	return finding{Status: statusOK, Text: fmt.Sprintf(format, args...)}
}

func warn(do, format string, args ...any) finding {
	return finding{Status: statusWarn, Text: fmt.Sprintf(format, args...), Do: do}
}

func fail(do, format string, args ...any) finding {
	return finding{Status: statusFail, Text: fmt.Sprintf(format, args...), Do: do}
}

// checks lists all checks, in the order in which an operator would fix things.
func checks() []check {
	return []check{
		{"configuration", checkConfiguration},
		{"privileges", checkPrivileges},
		{"kernel", checkKernel},
		{"cgroups", checkCgroups},
		{"limits", checkLimits},
		{"directories", checkDirectories},
		{"socket", checkSocket},
		{"runtimes", checkRuntimes},
		{"storage", checkStorage},
		{"network", checkNetwork},
	}
}

// checkTimeout bounds one check: a preflight must not hang where a node does.
const checkTimeout = 30 * time.Second

// runChecks runs all checks one after the other.
func runChecks(ctx context.Context, all []check, n *node) []finding {
	var findings []finding
	for _, c := range all {
		ctx, cancel := context.WithTimeout(ctx, checkTimeout)
		for _, f := range c.run(ctx, n) {
			f.Check = c.name
			findings = append(findings, f)
		}
		cancel()
	}
	return findings
}

func (p *program) checkCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check whether this node has what crius and its pods need",
		Long: "Check whether this node has what crius and its pods need, with the configuration in force, and say what to do where it has not. " +
			"Nothing is changed but that an image store is made where there is none, and a server may be running. The exit status is 1 if crius would not start, or no pod would run.",
		Args: usage(cobra.NoArgs),
	}
	format := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := p.load(cmd)
		if err != nil {
			return err
		}
		findings := runChecks(cmd.Context(), checks(), &node{config: loaded, host: host{"/"}})
		err = format.print(cmd.OutOrStdout(), findings, func(w io.Writer) { writeFindings(w, findings) })
		return cmp.Or(err, verdict(findings))
	}
	return cmd
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
		fmt.Fprintf(w, "%-5s %-14s %s\n", f.Status, name, printable(f.Text))
		if f.Do != "" {
			fmt.Fprintf(w, "%-5s %-14s -> %s\n", "", "", printable(f.Do))
		}
	}
}

// verdict is an error if crius cannot work.
func verdict(findings []finding) error {
	failed := 0
	for _, f := range findings {
		if f.Status == statusFail {
			failed++
		}
	}
	switch failed {
	case 0:
		return nil
	case 1:
		return fmt.Errorf("this node is not ready: 1 finding above says FAIL")
	}
	return fmt.Errorf("this node is not ready: %d findings above say FAIL", failed)
}
