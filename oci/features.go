package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Abilities is what a runtime said about itself.
type Abilities struct {
	Path     string
	Version  string             // first line of --version, bounded
	Features *features.Features // nil where the runtime has no `features` command, and nobody speaks for it
	// RecursiveReadOnly ("rro" mounts) is told by Features, or known by version
	// where a runtime is older than the command.
	RecursiveReadOnly bool
	IDMap             bool // id-mapped mounts
	// Sandboxed: the containers of a pod share a sandbox that the runtime makes for
	// the first of them, with a kernel of its own.
	Sandboxed bool

	traits traits
	behind string // version of the runtime that a shim runs
}

// ErrNotInstalled is a runtime that the configuration names without a path and
// that is nowhere in PATH: this node simply does not offer the handler. A path
// that leads nowhere is another matter: somebody relies on it.
var ErrNotInstalled = errors.New("not installed")

// prober asks a runtime binary about itself and remembers the answer for as
// long as the binary stays the same file, because Status asks every second.
type prober struct {
	mu       sync.Mutex
	identity fileIdentity
	answer   *Abilities
	last     atomic.Pointer[Abilities] // answer, for who does not wait
}

type fileIdentity struct {
	path     string
	dev, ino uint64
	size     int64
	mtime    unix.Timespec
}

// probe: asked is how the program is asked.
func (p *prober) probe(ctx context.Context, binary string, asked func(ctx context.Context, path string) (*Abilities, error)) (*Abilities, error) {
	path, err := exec.LookPath(binary)
	if errors.Is(err, exec.ErrNotFound) {
		return nil, fmt.Errorf("no %q in PATH: %w: install it or give its path in runtime.handlers: %w", binary, ErrNotInstalled, fault.Unavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("runtime binary %q cannot be run (%w): install it or correct runtime.handlers: %w", binary, err, fault.Unavailable)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	identity := fileIdentity{path: path, dev: st.Dev, ino: st.Ino, size: st.Size, mtime: st.Mtim}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.answer != nil && p.identity == identity {
		return p.answer, nil
	}
	answer, err := asked(ctx, path)
	if err != nil {
		return nil, err
	}
	p.identity, p.answer = identity, answer
	p.last.Store(answer)
	return answer, nil
}

const probeTimeout = 10 * time.Second

// ask: known, unless it is nil, stands in for the answer to `features`.
func ask(ctx context.Context, path string, known *features.Features) (*Abilities, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	version, err := output(ctx, path, "--version")
	if err != nil {
		return nil, fmt.Errorf("ask runtime for its version: %w", err)
	}
	a := &Abilities{Path: path, Version: firstLine(version)}
	a.traits = traitsOf(a.Version)
	a.Sandboxed = a.traits.sandboxed
	if known == nil {
		if text, err := output(ctx, path, "features"); err == nil {
			known, _ = parseFeatures(text) // an old one prints what it likes
		}
	}
	if known != nil {
		a.believe(known)
		return a, nil
	}
	// crun learnt `features` in 1.8.6 and rro mounts long before, in 1.4. Of its
	// id-mapped mounts nothing is said here: 1.8.1 makes them, but in a user
	// namespace it forgets nosuid, nodev and noexec of writable bind mounts.
	if name, major, minor := parseVersion(a.Version); name == "crun" {
		a.RecursiveReadOnly = major > 1 || major == 1 && minor >= 4
	}
	return a, nil
}

func (a *Abilities) believe(f *features.Features) {
	a.Features = f
	a.RecursiveReadOnly = slices.Contains(f.MountOptions, "rro")
	a.IDMap = f.Linux != nil && f.Linux.MountExtensions != nil &&
		f.Linux.MountExtensions.IDMap != nil && f.Linux.MountExtensions.IDMap.Enabled != nil &&
		*f.Linux.MountExtensions.IDMap.Enabled
}

func parseFeatures(text []byte) (*features.Features, error) {
	f := new(features.Features)
	if err := json.Unmarshal(text, f); err != nil {
		return nil, err
	}
	if f.OCIVersionMax == "" {
		return nil, errors.New("it has no ociVersionMax")
	}
	return f, nil
}

// readFeatures reads a file that stands in for the answer to `features`; no path
// is no file.
func readFeatures(path string) (*features.Features, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, fault.Invalid)
	}
	f, err := parseFeatures(text)
	if err != nil {
		return nil, fmt.Errorf("%s is not what the features command of a runtime prints: %w: %w", path, err, fault.Invalid)
	}
	return f, nil
}

var versionLine = regexp.MustCompile(`^(\S+) version (\d+)\.(\d+)`)

func parseVersion(line string) (name string, major, minor int) {
	m := versionLine.FindStringSubmatch(line)
	if m == nil {
		return "", 0, 0
	}
	major, _ = strconv.Atoi(m[2])
	minor, _ = strconv.Atoi(m[3])
	return m[1], major, minor
}

func firstLine(text []byte) string {
	line, _, _ := strings.Cut(string(text), "\n")
	if len(line) > 200 {
		line = line[:200]
	}
	return strings.ToValidUTF8(line, "?")
}
