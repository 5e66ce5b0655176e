package tools

import (
	"context"
	_ "embed"
	"os/exec"
	"path/filepath"
)

// criuScript unpacks criu from Debian's unstable distribution into a directory.
//
//go:embed criu.sh
var criuScript string

// Criu is the same for a criu that works on current kernels: Debian 12's (3.17.1) cannot even start on
// Linux 6.13. It comes from Debian's unstable distribution, with the libraries that it needs, and stays in
// its directory: this machine's packages and apt's configuration are neither used nor changed.
func Criu(ctx context.Context) (string, error) {
	dir, err := cached("criu-sid", func(_, dir string) *exec.Cmd {
		return exec.CommandContext(ctx, "bash", "-c", criuScript, "criu.sh", filepath.Join(dir, "criu-sid"))
	})
	return filepath.Join(dir, "criu"), err
}
