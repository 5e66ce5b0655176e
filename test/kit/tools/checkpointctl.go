package tools

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
)

// Checkpointctl returns the path of the program with which people look into checkpoints, and builds a missing one. The
// version is that of the module in test/tools/checkpointctl.
func Checkpointctl(ctx context.Context) (string, error) {
	const module = "github.com/checkpoint-restore/checkpointctl"
	dir, version, err := pinned("checkpointctl", module)
	if err != nil {
		return "", err
	}
	return cached(filepath.Join("checkpointctl-"+version, "checkpointctl"), func(_, out string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(out, "checkpointctl"), module)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
		return cmd
	})
}
