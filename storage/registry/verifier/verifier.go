// Package verifier asks programs of the operator whether an image may be used, by the protocol of
// containerd's image verifiers: every file of a directory is a program, which is called with
//
//	-name NAME -digest DIGEST -stdin-media-type application/vnd.oci.descriptor.v1+json
//
// and the descriptor of the image on its standard input. It accepts the image by exit code 0, and
// says why or why not on its standard output. All of them must accept it.
//
// A program that cannot be run, or takes too long, counts as one that refuses. So does a directory
// that does not exist, unlike with containerd: a typing error must not switch verification off.
package verifier

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/registry/trust"
)

const (
	maxPrograms = 64
	maxVerdict  = 4 << 10 // bytes of the output of one program that are kept
	maxAnswers  = 4096    // that are cached
	// keepAnswer bounds how long an image is accepted that a verifier would refuse by now: what it
	// reads, such as keys and policies, may change without it.
	keepAnswer = 10 * time.Minute
)

// Verifiers are the programs in a directory. They are safe for concurrent use.
type Verifiers struct {
	mu      sync.Mutex
	dir     string        // empty: every image is accepted
	timeout time.Duration // of each program
	answers map[[sha256.Size]byte]answer
	last    map[string]Verdict // by name and digest
	// uses counts calls of Use: an answer that was asked for before one is not given after it.
	uses int
}

// answer accepts an image.
type answer struct {
	given   time.Time
	verdict string
}

// Use has images checked by the programs in dir, each within timeout, also those that have been
// accepted before. An empty dir accepts every image.
func (v *Verifiers) Use(dir string, timeout time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.dir, v.timeout, v.answers, v.last = dir, timeout, nil, nil
	v.uses++
}

func (v *Verifiers) used() (dir string, timeout time.Duration, uses int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.dir, v.timeout, v.uses
}

// On reports whether there is a directory.
func (v *Verifiers) On() bool {
	dir, _, _ := v.used()
	return dir != ""
}

// Check asks all programs about an image under a name, and returns what they say. A refusal is
// trust.ErrSignature, and fault.Denied, or fault.Precondition if a program cannot be asked, or
// fault.Exhausted if that is for lack of processes.
func (v *Verifiers) Check(ctx context.Context, name string, image imagespec.Descriptor) (verdict string, err error) {
	dir, timeout, uses := v.used()
	if dir == "" {
		return "", nil
	}
	verdict, asked, err := v.ask(ctx, dir, timeout, name, image)
	if asked && ctx.Err() == nil {
		v.note(uses, Verdict{Name: name, Digest: image.Digest, Accepted: err == nil, Said: verdict, At: time.Now()}, err)
	}
	return verdict, err
}

// ask is Check, which also says whether the programs were asked.
func (v *Verifiers) ask(ctx context.Context, dir string, timeout time.Duration, name string, image imagespec.Descriptor) (verdict string, asked bool, err error) {
	programs, err := programsIn(dir)
	if err != nil {
		return "", true, fmt.Errorf("image verifiers: %w: %w: %w", err, trust.ErrSignature, fault.Precondition)
	}
	descriptor, err := json.Marshal(image)
	if err != nil {
		return "", false, err
	}
	key := v.key(programs, name, descriptor)
	if verdict, known := v.cached(key); known {
		return verdict, false, nil
	}
	var verdicts []string
	for _, p := range programs {
		err := trace.Do(ctx, "run image verifier", func(ctx context.Context) error {
			said, err := run(ctx, p.path, timeout, name, image.Digest, descriptor)
			verdicts = append(verdicts, filepath.Base(p.path)+": "+said)
			return err
		})
		if err != nil {
			return "", true, fmt.Errorf("image verifier %s: %w", filepath.Base(p.path), err)
		}
	}
	verdict = strings.Join(verdicts, "; ")
	v.cache(key, verdict)
	slog.InfoContext(ctx, "image verifiers accept the image", "image", name, "digest", image.Digest, "verdict", verdict)
	return verdict, true, nil
}

// file is a file of the directory as it is now.
type file struct {
	path  string
	state string // changes if the file is replaced or written
}

// programsIn returns the files of a directory, by name.
func programsIn(dir string) (all []file, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("image.verifiers_dir: %w: create it, or unset the option if images need not be verified", err)
	}
	if len(entries) > maxPrograms {
		return nil, fmt.Errorf("%s has %d files, at most %d verifiers are asked: remove some", dir, len(entries), maxPrograms)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		info, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		if !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
			return nil, fmt.Errorf("%s is not a program: remove it, or make it executable", path)
		}
		state := fmt.Sprint(info.Size(), info.ModTime().UnixNano())
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			state += fmt.Sprint(" ", st.Dev, st.Ino, st.Ctim.Nano())
		}
		all = append(all, file{path, state})
	}
	return all, nil
}

// run asks one program.
func run(ctx context.Context, path string, timeout time.Duration, name string, d digest.Digest, descriptor []byte) (said string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer within image.verifier_timeout (%s): %w: %w", timeout, trust.ErrSignature, fault.Precondition))
	defer cancel()
	defer trace.For(ctx, "image verifier "+filepath.Base(path))()
	out, diagnosis := &capture.Head{Max: maxVerdict}, &capture.Tail{Max: maxVerdict}
	cmd := exec.CommandContext(ctx, path, "-name", name, "-digest", d.String(), "-stdin-media-type", imagespec.MediaTypeDescriptor)
	cmd.Dir, cmd.Env = "/", inherit.Environ()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(descriptor), out, diagnosis
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	err = inherit.ExplainOutput(inherit.Start(cmd.Run), diagnosis.Begin())
	said = strings.TrimSpace(strings.ToValidUTF8(string(out.Bytes()), "?"))
	slog.DebugContext(ctx, "image verifier has ended", "program", path, "image", name, "verdict", said, "stderr", diagnosis.String(), "err", err)
	var exit *exec.ExitError
	switch {
	case err == nil, errors.Is(err, exec.ErrWaitDelay): // a child has kept its output open
		return said, nil
	case ctx.Err() != nil:
		return said, context.Cause(ctx)
	case errors.Is(err, fault.Exhausted): // it has said nothing of the image
		return said, fmt.Errorf("%w: %w", err, trust.ErrSignature)
	case errors.As(err, &exit) && exit.Exited():
		return said, fmt.Errorf("refuses %s (exit code %d): %s: %w: %w", name, exit.ExitCode(), said, trust.ErrSignature, fault.Denied)
	}
	return said, fmt.Errorf("%w: %w: %w", err, trust.ErrSignature, fault.Precondition)
}

// key stands for these programs, and for all that they are told of an image.
func (v *Verifiers) key(programs []file, name string, descriptor []byte) [sha256.Size]byte {
	v.mu.Lock()
	defer v.mu.Unlock()
	return sha256.Sum256(fmt.Appendf(nil, "%d %q %q %q", v.uses, programs, name, descriptor))
}

func (v *Verifiers) cached(key [sha256.Size]byte) (verdict string, ok bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	a, ok := v.answers[key]
	return a.verdict, ok && time.Since(a.given) < keepAnswer
}

func (v *Verifiers) cache(key [sha256.Size]byte, verdict string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.answers == nil || len(v.answers) >= maxAnswers {
		v.answers = map[[sha256.Size]byte]answer{}
	}
	v.answers[key] = answer{time.Now(), verdict}
}
