package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/programs"
)

// command is one short-lived run of a foreign program: in its own process
// group, which is killed as a whole when the context ends, with bounded output,
// and with the end of its standard error as the error's text.
type command struct {
	argv  []string
	stdin []byte
	env   []string   // in addition to inherit.Environ
	files []*os.File // passed as descriptors 3 and up
}

// mountItselfIn tells crun below 1.9 where to mount itself for a moment, which
// it does at each call so that no container can overwrite it: if it is killed
// just then, the mount stays. In the container's own directory the mount is
// removed with the container; by default crun would use /tmp. (The variable's
// name is from runc, which sets it for itself.)
func mountItselfIn(dir string) []string { return []string{"_LIBCONTAINER_STATEDIR=" + dir} }

const (
	maxOutput    = 1 << 20 // far above the output of any verb of a runtime
	maxDiagnosis = 4 << 10 // kept of an error's output
)

func (c command) run(ctx context.Context) ([]byte, error) {
	cmd := exec.CommandContext(ctx, c.argv[0], c.argv[1:]...)
	killGroup(cmd)
	cmd.Dir, cmd.Env = "/", append(inherit.Environ(), c.env...)
	cmd.ExtraFiles = c.files
	out, diag := &capture.Head{Max: maxOutput}, &capture.Tail{Max: maxDiagnosis}
	cmd.Stdout, cmd.Stderr = out, diag
	if len(c.stdin) > 0 { // otherwise no pipe is needed
		cmd.Stdin = bytes.NewReader(c.stdin)
	}
	if err := inherit.Start(cmd.Run); err != nil {
		if ctx.Err() != nil {
			err = timeoutError(context.Cause(ctx))
		}
		if err := inherit.ExplainOutput(err, diag.Begin()); errors.Is(err, fault.Exhausted) {
			return nil, err
		}
		return nil, describe(err, diag.String())
	}
	return out.Bytes(), nil
}

// pipeTime is how long the output of an ended program may take to arrive, which
// is long on a busy node. Only processes that the program left running keep the
// pipe open for longer.
const pipeTime = 5 * time.Second

// killGroup puts cmd into its own session, and so its own process group, and
// kills the group when the command's context ends. It does not wait for
// descendants that keep a pipe open.
func killGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = pipeTime
}

func output(ctx context.Context, argv ...string) ([]byte, error) {
	return command{argv: argv}.run(ctx)
}

func timeoutError(cause error) error {
	if errors.Is(cause, context.DeadlineExceeded) {
		return fmt.Errorf("timed out and was killed: %w", fault.Timeout)
	}
	return cause
}

func describe(err error, diagnosis string) error {
	if diagnosis = strings.TrimSpace(diagnosis); diagnosis != "" {
		return fmt.Errorf("%w: %s", err, diagnosis)
	}
	return err
}

// findMonitor locates crius-conmon: at the configured path, else beside this
// program, else in PATH.
func findMonitor(configured string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	path, err := programs.Find("crius-conmon", programs.Dir())
	if err != nil {
		return "", fmt.Errorf("crius-conmon not found in the directory of crius or in PATH: install it or set runtime.monitor: %w", fault.Unavailable)
	}
	return path, nil
}
