package tools

import (
	"context"
	"os/exec"
	"path/filepath"
)

// Parts are the programs that critest and its images are made of, all of them
// static.
type Parts struct {
	Suite   string // critest as it was built
	Busybox string
	Standin string // see test/conformance/standin
}

// CritestParts builds the parts where they are missing, busybox in some minutes.
func CritestParts(ctx context.Context) (p Parts, err error) {
	if p.Suite, err = Critest(ctx); err != nil {
		return Parts{}, err
	}
	if p.Busybox, err = Busybox(ctx); err != nil {
		return Parts{}, err
	}
	if p.Standin, err = Standin(ctx); err != nil {
		return Parts{}, err
	}
	return p, nil
}

// Busybox returns the path of a busybox with every applet that critest calls and
// without a shell that runs them by itself, and builds it from Debian's sources
// where it is missing.
func Busybox(ctx context.Context) (string, error) {
	return cached("busybox", func(repo, dir string) *exec.Cmd {
		script := filepath.Join(repo, "test", "conformance", "busybox.sh")
		return exec.CommandContext(ctx, script, filepath.Join(dir, "busybox"))
	})
}
