package tools

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
)

// Distribution returns the path of CNCF Distribution's registry with what tests use of it, and builds a
// missing one. The version is that of the module in test/tools/distribution.
func Distribution(ctx context.Context) (string, error) {
	distribution.Lock() // for tests that need it at the same time
	defer distribution.Unlock()
	const module = "github.com/distribution/distribution/v3"
	dir, version, err := pinned("distribution", module)
	if err != nil {
		return "", err
	}
	return cached(filepath.Join("distribution-"+version, "registry"), func(_, out string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(out, "registry"), ".")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
		return cmd
	})
}

var distribution sync.Mutex
