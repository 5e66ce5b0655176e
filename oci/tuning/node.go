package tuning

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
)

// Node is the machine that is changed. The zero value is this machine.
type Node struct {
	// Root is the directory that contains /proc, /sys and /etc; empty: the node's
	// own.
	Root string
	// ReadCgroup and WriteCgroup are those of package cgroup.
	ReadCgroup  func(cgroup, name string) (string, error)
	WriteCgroup func(cgroup, name, value string) error
	// Run runs a program, with additional environment variables.
	Run func(ctx context.Context, env []string, name string, args ...string) error
}

func (n *Node) fill() {
	if n.ReadCgroup == nil {
		n.ReadCgroup, n.WriteCgroup = cgroup.ReadFile, cgroup.WriteFile
	}
	if n.Run == nil {
		n.Run = run
	}
}

// runTime is longer than systemd takes to restart irqbalance.
const runTime = 30 * time.Second

func run(ctx context.Context, env []string, name string, args ...string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, runTime, fmt.Errorf("it did not finish within %s and was killed: %w", runTime, fault.Timeout))
	defer cancel()
	defer trace.For(ctx, "program "+filepath.Base(name))()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env, cmd.WaitDelay = append(os.Environ(), env...), time.Second
	out, err := cmd.CombinedOutput()
	if err != nil && ctx.Err() != nil { // the program's error says only that it was killed
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %.500s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// read reads a file of one line.
func (n *Node) read(path string) (string, error) {
	text, err := os.ReadFile(filepath.Join(n.Root, path))
	return strings.TrimSpace(string(text)), err
}

// write writes a kernel file, which must exist.
func (n *Node) write(path, value string) error {
	f, err := os.OpenFile(filepath.Join(n.Root, path), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	if closed := f.Close(); err == nil {
		err = closed
	}
	return err
}
