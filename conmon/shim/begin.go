package shim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/runtime/bootstrap/v1"
	task "github.com/containerd/containerd/api/runtime/task/v2"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
)

// Program is a shim with its settings for one container.
type Program struct {
	Path string
	ID   string // of the container
	Dir  string // its run directory: the bundle
	// Server identifies the server to the shim, by which the shim decides whether
	// two containers have the same one. Nothing listens there.
	Server string
	// Publisher is the program that a shim runs to publish an event.
	Publisher string
	// Events is the socket that receives events; empty: none does.
	Events  string
	Options *anypb.Any // of the runtime; nil: none
	// Older: the shim is known to be older than containerd 2.3.
	Older bool
}

// Begin runs the shim's start command, which starts a shim for the container or
// finds the existing one for it. Since containerd 2.3 a shim reads everything
// from its standard input. An older one takes flags and reads only the
// runtime's options: where it refuses the new form it is run again with the old
// one. The flags are the same with both.
//
// The old form is not the first try, even though newer shims can refuse it:
// those of 2.3 take options for the new form and use a wrong id.
func (p Program) Begin(ctx context.Context) (Endpoint, error) {
	forms := []func() ([]byte, error){p.params, p.optionsAlone}
	if p.Older {
		slices.Reverse(forms)
	}
	var failures []error
	for _, form := range forms {
		stdin, err := form()
		if err != nil {
			return Endpoint{}, err
		}
		answer, err := p.run(ctx, stdin, "start")
		if err == nil {
			e, err := parseEndpoint(answer)
			if err != nil {
				return e, fmt.Errorf("start shim %s: %w: %w", p.Path, err, fault.Unavailable)
			}
			return e, nil
		}
		if len(failures) == 0 || err.Error() != failures[0].Error() {
			failures = append(failures, err)
		}
		if _, refused := errors.AsType[*exec.ExitError](err); !refused || ctx.Err() != nil {
			break
		}
	}
	if len(failures) == 1 {
		return Endpoint{}, fmt.Errorf("start shim %s: %w", p.Path, failures[0])
	}
	return Endpoint{}, fmt.Errorf("start shim %s: %w; in the form of older shims: %w", p.Path, failures[0], failures[1])
}

// params is the input of shims since containerd 2.3.
func (p Program) params() ([]byte, error) {
	params := &bootstrap.BootstrapParams{
		InstanceID: p.ID, Namespace: Namespace, ContainerdTtrpcAddress: p.events(), ContainerdGrpcAddress: p.Server, ContainerdBinary: p.Publisher,
	}
	if p.Options != nil {
		params.Extensions = []*bootstrap.Extension{{Value: p.Options}}
	}
	return proto.Marshal(params)
}

// optionsAlone is the input of older shims.
func (p Program) optionsAlone() ([]byte, error) {
	if p.Options == nil {
		return nil, nil
	}
	return proto.Marshal(p.Options)
}

// Delete runs the shim's delete command, which removes the remains of the
// container and of a dead shim. It returns how the container ended if the shim
// knows.
func (p Program) Delete(ctx context.Context) (exitStatus int, err error) {
	// Containerd's own shims look for the bundle under the container's id, beside
	// their working directory.
	if name := filepath.Join(filepath.Dir(p.Dir), p.ID); name != p.Dir {
		if err := os.Symlink(p.Dir, name); err != nil && !errors.Is(err, os.ErrExist) {
			return 0, err
		}
		defer func() { _ = os.Remove(name) }()
	}
	answer, err := p.run(ctx, nil, "-bundle", p.Dir, "delete")
	if err != nil {
		return 0, fmt.Errorf("shim %s delete: %w", p.Path, err)
	}
	var died task.DeleteResponse
	if err := proto.Unmarshal(answer, &died); err != nil {
		return 0, fmt.Errorf("shim %s delete: cannot parse its answer %.200q: %w", p.Path, answer, err)
	}
	return int(died.ExitStatus), nil
}

func (p Program) events() string {
	if p.Events == "" {
		return ""
	}
	return "unix://" + p.Events
}

// maxAnswer is far above the size of a shim's answer.
const maxAnswer = 1 << 20

// run executes the shim's program, in the run directory, in its own process
// group, which is killed as a whole when the context ends. The daemon that
// start leaves behind keeps, in some versions, standard error open: so that
// goes to a file.
func (p Program) run(ctx context.Context, stdin []byte, verb ...string) ([]byte, error) {
	words, err := os.CreateTemp(p.Dir, "shim-words-")
	if err != nil {
		return nil, err
	}
	defer words.Close()
	defer func() { _ = os.Remove(words.Name()) }()
	args := append([]string{"-namespace", Namespace, "-id", p.ID, "-address", p.Server, "-publish-binary", p.Publisher}, verb...)
	cmd := exec.CommandContext(ctx, p.Path, args...)
	cmd.Dir = p.Dir
	cmd.Env = append(inherit.Environ(), "GOMAXPROCS=2", "MAX_SHIM_VERSION=3", "TTRPC_ADDRESS="+p.events(), "GRPC_ADDRESS="+p.Server, "NAMESPACE="+Namespace)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = time.Second
	answer := &capture.Head{Max: maxAnswer}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), answer, words
	if err := inherit.Start(cmd.Run); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("timed out and was killed: %w", context.Cause(ctx))
		}
		return nil, explained(err, words.Name())
	}
	return answer.Bytes(), nil
}

// explained adds the end of a program's error output, from a file, without the
// list of flags with which a program ends a complaint about its arguments.
func explained(err error, file string) error {
	const end = 4096
	text, _ := os.ReadFile(file)
	text = text[max(0, len(text)-end):]
	words, _, _ := strings.Cut(strings.ToValidUTF8(string(text), "?"), "\nUsage of ")
	if words = strings.TrimSpace(words); words != "" {
		return fmt.Errorf("%w: %s", err, words)
	}
	return err
}
