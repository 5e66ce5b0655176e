package tools

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/crius-run/crius/internal/testkit/node"
)

// runcModule is a runc of today, which maps ids of mounts; Debian 12's cannot.
const runcModule = "github.com/opencontainers/runc@v1.5.2"

// Runc returns the path of a current runc and builds it where it is missing,
// which needs a C compiler and libseccomp-dev.
func Runc(ctx context.Context) (string, error) {
	repo, err := node.Repository()
	if err != nil {
		return "", err
	}
	path := filepath.Join(repo, ".cache", "bin", "runc")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	out, err := exec.CommandContext(ctx, "go", "mod", "download", "-json", runcModule).Output()
	if err != nil {
		return "", fmt.Errorf("download %s: %w: %s", runcModule, err, out)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(out, &module); err != nil {
		return "", fmt.Errorf("download %s: %w", runcModule, err)
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", path, ".")
	cmd.Dir = module.Dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1", "GOFLAGS=-tags=seccomp")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", runcModule, err, out)
	}
	return path, nil
}
