package oci

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/flight"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/oci/version"
)

// Abilities is what a runtime reports about itself.
type Abilities struct {
	Path     string
	Version  string             // first line of --version, bounded
	Features *features.Features // nil if the runtime has no `features` command and no file stands in for it
	// RecursiveReadOnly ("rro" mounts) is reported by Features, or known by
	// version for a runtime older than that command.
	RecursiveReadOnly bool
	IDMap             bool // id-mapped mounts
	CgroupNamespaces  bool
	ExecCPUAffinity   bool // exec processes can be confined to some of the container's CPUs
	// Sandboxed: the containers of a pod share a runtime sandbox with its own kernel,
	// which the runtime makes for the first of them.
	Sandboxed bool
	// VirtualMachine: the runtime sandbox is a virtual machine, whose size follows from
	// the limits of all of its containers.
	VirtualMachine bool

	quirks quirks
	behind string // version of the runtime that a shim runs
}

// ErrNotInstalled is a runtime that the configuration names without a path and
// that is not in PATH: the handler is not expected to work on this node. A path
// that leads nowhere is worth a warning.
var ErrNotInstalled = errors.New("not installed")

// prober asks a runtime binary about itself and remembers the answer for as
// long as the binary stays the same file, because the kubelet asks for Status
// every second. A slow binary is run once, and all callers wait for that
// answer.
type prober struct {
	asking flight.Group[fileIdentity, *Abilities]
	last   atomic.Pointer[probed] // nil: none, or the binary has failed since
}

// question runs the program at path to find out what it can do.
type question func(ctx context.Context, path string) (*Abilities, error)

type probed struct {
	identity fileIdentity
	answer   *Abilities
}

type fileIdentity struct {
	path     string
	dev, ino uint64
	size     int64
	mtime    unix.Timespec
}

// probe returns what the binary can do; asked runs it to find out.
func (p *prober) probe(ctx context.Context, binary string, asked question) (*Abilities, error) {
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
	if last := p.last.Load(); last != nil && last.identity == identity {
		return last.answer, nil
	}
	answer, err := p.asking.Do(ctx, identity, func(ctx context.Context) (*Abilities, error) {
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		answer, err := asked(ctx, path)
		switch {
		case err == nil:
			p.last.Store(&probed{identity, answer})
		case !errors.Is(err, fault.Timeout):
			p.last.Store(nil)
		}
		return answer, err
	})
	if errors.Is(err, fault.Timeout) || errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("%s did not report its version and features in time; run it with --version to see why: %w", path, fault.Timeout)
	}
	return answer, err
}

// answer returns the binary's last answer; nil if there is none yet.
func (p *prober) answer() *Abilities {
	if last := p.last.Load(); last != nil {
		return last.answer
	}
	return nil
}

const (
	probeTimeout = 10 * time.Second
	// StatusTime is how long a status waits for runtimes that have not yet
	// reported what they can do. The probes nevertheless continue for up to
	// probeTimeout, for the next status.
	StatusTime = 2 * time.Second
)

// ask runs the runtime at path. known, unless it is nil, stands in for the
// answer to `features`.
func ask(ctx context.Context, path string, known *features.Features) (*Abilities, error) {
	answer, err := output(ctx, path, "--version")
	if err != nil {
		return nil, fmt.Errorf("%s --version: %w: %w", path, err, fault.Unavailable)
	}
	a := &Abilities{Path: path, Version: version.Line(answer)}
	a.quirks = quirksOf(a.Version)
	a.Sandboxed, a.VirtualMachine = a.quirks.sandboxed, a.quirks.machine
	name, number := version.Parse(a.Version)
	a.ExecCPUAffinity = name == "runc" && number.Has(1, 3) || name == "crun" && number.Has(1, 19)
	if known == nil {
		text, err := output(ctx, path, "features")
		if errors.Is(err, fault.Timeout) {
			return nil, err
		}
		if err == nil {
			known, _ = parseFeatures(text) // an old one prints anything
		}
	}
	if known != nil {
		a.believe(known)
		return a, nil
	}
	// crun has had `features` since 1.8.6 and rro mounts since 1.4. Its id-mapped
	// mounts are not set here: 1.8.1 makes them, but in a user namespace it
	// forgets nosuid, nodev and noexec of writable bind mounts.
	a.RecursiveReadOnly = name == "crun" && number.Has(1, 4)
	a.CgroupNamespaces = name == "crun" || name == "runc"
	return a, nil
}

// CanServe returns why the handler cannot create containers: its runtime would
// ignore one of the handler's options. Existing containers are not affected.
func (a *Abilities) CanServe(name string, h Handler) error {
	if h.ExecCPUAffinity == "" || a.ExecCPUAffinity {
		return nil
	}
	return fmt.Errorf("handler %s: exec_cpu_affinity needs runc 1.3, crun 1.19 or a later version, not %q: update the runtime or remove runtime.handlers.%s.exec_cpu_affinity: %w",
		name, cmp.Or(a.behind, a.Version), name, fault.Unavailable)
}

func (a *Abilities) believe(f *features.Features) {
	a.Features = f
	a.RecursiveReadOnly = slices.Contains(f.MountOptions, "rro")
	a.IDMap = f.Linux != nil && f.Linux.MountExtensions != nil &&
		f.Linux.MountExtensions.IDMap != nil && f.Linux.MountExtensions.IDMap.Enabled != nil &&
		*f.Linux.MountExtensions.IDMap.Enabled
	a.CgroupNamespaces = f.Linux != nil && slices.Contains(f.Linux.Namespaces, string(specs.CgroupNamespace))
}

func parseFeatures(text []byte) (*features.Features, error) {
	f := new(features.Features)
	if err := json.Unmarshal(text, f); err != nil {
		return nil, err
	}
	if f.OCIVersionMax == "" {
		return nil, errors.New("ociVersionMax is missing")
	}
	return f, nil
}

// maxFeatures bounds the bytes of a features file.
const maxFeatures = 1 << 20

// readFeatures reads a file that stands in for the answer to `features`. An
// empty path means no file.
func readFeatures(path string) (*features.Features, error) {
	if path == "" {
		return nil, nil
	}
	text, err := regular.Read(path, maxFeatures)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, fault.Invalid)
	}
	f, err := parseFeatures(text)
	if err != nil {
		return nil, fmt.Errorf("%s is not the output of a runtime's features command: %w: %w", path, err, fault.Invalid)
	}
	return f, nil
}
