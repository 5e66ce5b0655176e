package main

import (
	"context"
	"log/slog"
	"strings"

	"github.com/crius-run/crius/oci/hooks"
)

// reportHooks logs invalid hooks, which keep containers from being created. The server
// starts nevertheless, since hooks are read again for each container.
func reportHooks(ctx context.Context, dirs []string) {
	usable, errs := hooks.Check(dirs)
	for _, err := range errs {
		slog.ErrorContext(ctx, "invalid hook: containers cannot be created until it is corrected or removed", "err", err)
	}
	if usable > 0 {
		slog.InfoContext(ctx, "OCI hooks installed", "hooks", usable, "dirs", dirs)
	}
}

// checkHooks checks the hooks that containers get.
func (n *node) checkHooks(context.Context) []finding {
	dirs := n.config.Config.Runtime.HooksDir
	usable, errs := hooks.Check(dirs)
	var findings []finding
	for _, err := range errs {
		findings = append(findings, fail("correct or remove it: containers cannot be created until then", "%v", err))
	}
	switch {
	case len(dirs) == 0:
		findings = append(findings, ok("no hook directories"))
	case len(errs) == 0 || usable > 0:
		findings = append(findings, ok("%d usable in %s", usable, strings.Join(dirs, ", ")))
	}
	return findings
}
