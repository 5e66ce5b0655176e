package hooks

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/trace"
)

const (
	defaultTimeout = 30 * time.Second // for a precreate hook that sets none
	maxOutput      = 8 << 20          // the largest requests make a spec of two MiB
	maxDiagnosis   = 4 << 10          // kept of a hook's error output
)

// filter replaces the spec with the hook's output.
func (h *hook) filter(ctx context.Context, s *specs.Spec) error {
	before, err := json.Marshal(s)
	if err != nil {
		return err
	}
	after, err := h.run(ctx, before)
	if err != nil {
		return err
	}
	changed := &specs.Spec{}
	if err := json.Unmarshal(after, changed); err != nil {
		return fmt.Errorf("hook output is not an OCI configuration: %w: %w", err, fault.Precondition)
	}
	if field := fixed(s, changed); field != "" {
		return fmt.Errorf("hook must not change %s: %w", field, fault.Precondition)
	}
	*s = *changed
	return nil
}

// fixed returns the name of the first changed field on which records, monitors
// and the teardown rely, "" if there is none.
func fixed(before, after *specs.Spec) string {
	switch {
	case after.Process == nil || after.Process.Terminal != before.Process.Terminal:
		return "process.terminal"
	case after.Root == nil || after.Root.Path != before.Root.Path:
		return "root.path"
	case after.Linux == nil || after.Linux.CgroupsPath != before.Linux.CgroupsPath:
		return "linux.cgroupsPath"
	}
	return ""
}

// run runs the program with only its own environment, in its own session, which
// is killed as a whole when the time is up or the output is too long.
func (h *hook) run(ctx context.Context, stdin []byte) ([]byte, error) {
	limit := defaultTimeout
	if h.hook.Timeout != nil {
		limit = time.Duration(*h.hook.Timeout) * time.Second
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("hook did not finish within %s and was killed: %w", limit, fault.Timeout))
	defer cancel()
	defer trace.For(ctx, "hook "+filepath.Base(h.hook.Path))()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	tooLong := fmt.Errorf("output exceeds %d bytes, killed: %w", maxOutput, fault.Precondition)
	out := &capture.Head{Max: maxOutput, Full: func() error { stop(tooLong); return tooLong }}
	diagnosis := &capture.Tail{Max: maxDiagnosis}
	cmd := exec.CommandContext(ctx, h.hook.Path)
	if len(h.hook.Args) > 0 {
		cmd.Args = h.hook.Args
	}
	cmd.Dir, cmd.Env = "/", append([]string{}, h.hook.Env...) // nil would mean the server's
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), out, diagnosis
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	err := inherit.ExplainOutput(inherit.Start(cmd.Run), diagnosis.Begin())
	switch {
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case errors.Is(err, fault.Exhausted):
		return nil, err
	case errors.Is(err, exec.ErrWaitDelay): // a child has kept its output open
		err = nil
	case err != nil:
		err = fmt.Errorf("%w: %w", err, fault.Precondition)
	}
	if said := strings.TrimSpace(diagnosis.String()); err != nil && said != "" {
		err = fmt.Errorf("%w; output: %q", err, said)
	}
	return out.Bytes(), err
}
