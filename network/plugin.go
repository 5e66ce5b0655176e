package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/backoff"
	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/poll"
	"github.com/crius-run/crius/internal/trace"
)

const (
	maxOutput = 1 << 20         // of a plugin's standard output; results have a few kilobytes
	maxTail   = 4 << 10         // kept of the end of a plugin's standard error
	waitDelay = 1 * time.Second // for output that children of a dead plugin keep open
)

// runner runs plugins for libcni.
type runner struct{ version.PluginDecoder }

var _ invoke.Exec = &runner{}

// FindInPath is called by libcni to find a plugin.
func (*runner) FindInPath(plugin string, dirs []string) (string, error) { return find(plugin, dirs) }

func find(plugin string, dirs []string) (string, error) {
	for _, dir := range dirs {
		path := filepath.Join(dir, plugin)
		info, err := os.Stat(path)
		if err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("CNI plugin %q is not installed: no such executable in %s; install it in one of them or correct network.plugin_dirs: %w", plugin, strings.Join(dirs, ", "), fault.Unavailable)
}

// ExecPlugin runs a plugin to its end. When ctx is done, or the plugin prints
// without end, ExecPlugin kills it with all the children that have stayed in
// its process group. A child that outlives a successful plugin is left alone,
// and ExecPlugin does not wait for it even if it keeps the plugin's output
// open.
func (*runner) ExecPlugin(ctx context.Context, path string, stdin []byte, env []string) ([]byte, error) {
	return whileBusy(ctx, path, func() ([]byte, error) { return run(ctx, path, stdin, env) })
}

// busyTime is how long the file of a plugin may be open for writing, because it is just being
// installed: as long as libcni waits.
const busyTime = 5 * time.Second

// whileBusy calls run until the plugin at path is no longer busy, for busyTime. A plugin that is
// absent or incomplete fails at once, as with libcni: the kubelet tries again.
func whileBusy(ctx context.Context, path string, run func() ([]byte, error)) ([]byte, error) {
	end := time.Now().Add(busyTime)
	for pauses := backoff.New(10*time.Millisecond, time.Second); ; {
		out, err := run()
		left := time.Until(end)
		switch {
		case !errors.Is(err, unix.ETXTBSY):
			return out, err
		case left <= 0:
			return nil, fmt.Errorf("CNI plugin %q: %s has been open for writing for %s: is it still being installed?: %w: %w", filepath.Base(path), path, busyTime, err, fault.Unavailable)
		case !poll.Pause(ctx, min(pauses.Next(), left)):
			return nil, fmt.Errorf("CNI plugin %q: %w: %w", filepath.Base(path), err, context.Cause(ctx))
		}
	}
}

// deathSignal returns the signal that a plugin gets when crius dies. An ADD
// must not continue: the next crius will undo what was recorded, and must not
// be overtaken. A DEL must: not all plugins can repeat half of one (bridge
// reads the addresses whose firewall rules it must remove from the link that it
// removes first).
func deathSignal(env []string) syscall.Signal {
	if slices.Contains(env, "CNI_COMMAND=DEL") {
		return 0
	}
	return unix.SIGKILL
}

// start starts plugins. Tests replace it, because their nodes are network
// namespaces of a thread.
var start = inherit.Start

func run(ctx context.Context, path string, stdin []byte, env []string) ([]byte, error) {
	defer trace.For(ctx, "CNI plugin "+filepath.Base(path))()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	stdout := &capture.Head{Max: maxOutput, Full: func() error { stop(errTalkative); return errTalkative }}
	stderr := &capture.Tail{Max: maxTail}
	cmd := exec.CommandContext(ctx, path)
	cmd.Dir, cmd.Env = "/", env
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: deathSignal(env)}
	killed := false
	cmd.Cancel = func() error {
		killed = true
		return unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
	}
	cmd.WaitDelay = waitDelay

	// The death signal comes with the end of the thread, which must not end
	// before the plugin.
	err := start(cmd.Run)

	name := filepath.Base(path)
	switch {
	case killed:
		return nil, fmt.Errorf("%s was killed: %w%s", name, context.Cause(ctx), said(stderr))
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		if slices.Contains(env, "CNI_COMMAND=ADD") && !isResult(stdout.Bytes()) {
			return nil, fmt.Errorf("%s printed no CNI result but %q%s", name, clip(string(stdout.Bytes())), said(stderr))
		}
		return stdout.Bytes(), nil
	}
	if err := inherit.ExplainOutput(err, stderr.Begin()+string(stdout.Bytes())); errors.Is(err, fault.Exhausted) { // also of a plugin that it has run
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	var status *exec.ExitError
	if !errors.As(err, &status) {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	told := &types.Error{}
	if json.Unmarshal(stdout.Bytes(), told) != nil || told.Msg == "" {
		return nil, fmt.Errorf("%s: %w, no CNI error in its output %q%s", name, err, clip(string(stdout.Bytes())), said(stderr))
	}
	told.Msg, told.Details = clip(told.Msg), clip(told.Details)
	return nil, fmt.Errorf("%s: %w (CNI error %d)%s", name, told, told.Code, said(stderr))
}

var errTalkative = fmt.Errorf("output exceeds %d bytes", maxOutput)

// said returns the end of an error message: the plugin's output, if any.
func said(stderr *capture.Tail) string {
	if text := stderr.String(); text != "" {
		return fmt.Sprintf("; output: %q", text)
	}
	return ""
}

// clip makes the text of a plugin fit for an error message.
func clip(text string) string {
	const most = 512
	if len(text) > most {
		text = text[:most] + "..."
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// isResult reports whether text can be the result of an ADD: null, and the error of a plugin
// that then ends with 0, would decode as a result without addresses.
func isResult(text []byte) bool {
	var kind struct {
		Code uint `json:"code"`
	}
	err := json.Unmarshal(text, &kind)
	wrongType := errors.As(err, new(*json.UnmarshalTypeError)) // libcni says what is wrong with it
	return (err == nil && kind.Code == 0 || wrongType) && !bytes.Equal(bytes.TrimSpace(text), []byte("null"))
}
