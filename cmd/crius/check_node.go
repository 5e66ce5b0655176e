package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/server/control"
)

// nodeCheck is the name of the check that compares the records with the node.
const nodeCheck = "node"

// repairTimeout bounds a check with repair: a single network plugin may take two minutes.
const repairTimeout = 10 * time.Minute

// checkNode compares the node with its records. A running server does the comparison.
func checkNode(ctx context.Context, cfg config.Config, repair bool) []finding {
	limit := checkTimeout
	if repair {
		limit = repairTimeout
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no result within %s; crius status --stuck shows what the server is waiting for", limit))
	defer cancel()
	findings := describeNode(ctx, cfg, repair)
	for i := range findings {
		findings[i].Check = nodeCheck
	}
	return findings
}

func describeNode(ctx context.Context, cfg config.Config, repair bool) []finding {
	if os.Geteuid() != 0 {
		return []finding{fail("run as root", "cannot compare the node with crius's records")}
	}
	if !hasState(cfg) {
		return []finding{ok("no state yet in %s", cfg.Root)}
	}
	find := findLooker
	if repair {
		find = findKeeper
	}
	checked, err := asked(ctx, func(ctx context.Context) (checked control.Checked, err error) {
		who, release, err := find(ctx, cfg)
		if err != nil {
			return checked, err
		}
		defer closing(&err, release)
		return who.Check(ctx, repair)
	})
	if err != nil {
		advice := ""
		if errors.As(err, new(*net.OpError)) { // a server has its lock before its socket
			advice = "if a server has just been started, try again"
		}
		return []finding{fail(advice, "cannot compare the node with crius's records: %s", fault.Text(err))}
	}
	return nodeFindings(checked)
}

// nodeFindings returns the result as findings.
func nodeFindings(checked control.Checked) []finding {
	findings := []finding{}
	for _, f := range checked.Findings {
		findings = append(findings, nodeFinding(f))
	}
	if checked.Incomplete != "" {
		findings = append(findings, fail("", "the check is incomplete: %s", checked.Incomplete))
	}
	if len(checked.OpaqueIPAM) > 0 {
		findings = append(findings, ok("IP addresses held by %s are not checked: only that IPAM plugin knows them", strings.Join(checked.OpaqueIPAM, ", ")))
	}
	if len(checked.Findings) == 0 && checked.Incomplete == "" {
		findings = append(findings, ok("the node matches crius's records: %s, %s", cli.Count(checked.Pods, "pod"), cli.Count(checked.Containers, "container")))
	}
	return findings
}

func nodeFinding(f audit.Finding) finding {
	switch {
	case f.Repaired:
		return ok("repaired: %s: %s (%s)", f, f.Wrong, f.Remedy)
	case f.Minor:
		return warn(f.Advice, "%s: %s", f, f.Wrong)
	case f.Err != "":
		return fail("fix the cause, then run crius check --repair again", "%s: %s; the repair failed: %s", f, f.Wrong, f.Err)
	case f.Remedy != "":
		return fail("run crius check --repair, which will "+f.Remedy, "%s: %s", f, f.Wrong)
	}
	return fail(f.Advice, "%s: %s", f, f.Wrong)
}
