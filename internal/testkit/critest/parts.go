package critest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/crius-run/crius/internal/testkit/node"
	"github.com/crius-run/crius/internal/testkit/tools"
)

// Parts are the programs that the suite and its images are made of, all of them
// static.
type Parts struct {
	Suite   string // critest as it was built
	Busybox string
	Standin string // see test/conformance/standin
}

// Build builds the parts into the repository's .cache. Only what is missing
// there takes time, busybox some minutes.
func Build(ctx context.Context) (Parts, error) {
	repo, err := node.Repository()
	if err != nil {
		return Parts{}, err
	}
	cache := filepath.Join(repo, ".cache", "conformance")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return Parts{}, err
	}
	p := Parts{Busybox: filepath.Join(cache, "busybox"), Standin: filepath.Join(cache, "standin")}
	if p.Suite, err = tools.Critest(ctx); err != nil {
		return Parts{}, err
	}
	if _, err := os.Stat(p.Busybox); err != nil {
		fmt.Println("builds busybox, which takes some minutes, but only once")
		cmd := exec.CommandContext(ctx, filepath.Join(repo, "test", "conformance", "busybox.sh"), p.Busybox)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		if err := cmd.Run(); err != nil {
			return Parts{}, fmt.Errorf("build busybox: %w", err)
		}
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", p.Standin, "./test/conformance/standin")
	cmd.Dir = repo
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return Parts{}, fmt.Errorf("build the stand-in: %w: %s", err, out)
	}
	return p, nil
}
