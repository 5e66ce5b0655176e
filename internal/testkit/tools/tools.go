// Package tools builds the CRI programs that crius is tested with, from the
// module in test/tools, into the repository's .cache/bin.
package tools

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/crius-run/crius/internal/testkit/node"
)

// Crictl returns the path of crictl and builds it where it is missing.
func Crictl(ctx context.Context) (string, error) {
	return tool(ctx, "crictl", "build", "-o")
}

// Critest is the same for critest, the conformance suite.
func Critest(ctx context.Context) (string, error) {
	return tool(ctx, "critest", "test", "-c", "-o")
}

func tool(ctx context.Context, name string, build ...string) (string, error) {
	repo, err := node.Repository()
	if err != nil {
		return "", err
	}
	path := filepath.Join(repo, ".cache", "bin", name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	args := append(build, path, "sigs.k8s.io/cri-tools/cmd/"+name)
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = filepath.Join(repo, "test", "tools")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", name, err, out)
	}
	return path, nil
}
