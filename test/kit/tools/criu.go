package tools

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
)

// criuScript unpacks criu from Debian's unstable distribution into a directory.
//
//go:embed criu.sh
var criuScript string

// criuVersion is the oldest that can dump TCP sockets on Linux 6.18.
const criuVersion = "4.2.1"

// ErrNoCriu says that Debian's archives could not be reached: what needs criu cannot be tested here, but
// what crius says without it.
var ErrNoCriu = errors.New("criu is not available")

// Criu is the same for a criu that works on current kernels: Debian 12's (3.17.1) cannot even start on
// Linux 6.13. It comes from Debian's unstable distribution, with the libraries that it needs, and stays in
// its directory: this machine's packages and apt's configuration are neither used nor changed.
func Criu(ctx context.Context) (string, error) {
	name := "criu-" + criuVersion
	dir, err := fromDebian(ctx, name, []byte(criuScript), func(_, dir string) *exec.Cmd {
		return exec.CommandContext(ctx, "bash", "-c", criuScript, "criu.sh", filepath.Join(dir, name), criuVersion)
	})
	if errors.Is(err, errUnreachable) {
		return "", fmt.Errorf("%w: %w", ErrNoCriu, err)
	}
	return filepath.Join(dir, "criu"), err
}
