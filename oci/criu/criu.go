// Package criu finds the program that dumps and restores processes, says whether it works on this
// node, and writes the options that runtimes pass to it.
package criu

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
)

// Annotation names the file of options that runc and crun pass to criu. crius sets it for every
// container, since an action-script in such a file is run by root on the node.
const Annotation = "org.criu.config"

// OptionsFile is the name of that file in the directory of a container's bundle.
const OptionsFile = "criu.conf"

// minimum is the oldest version with the option network-lock, 3.17, and skips the oldest with its value
// skip.
const (
	minimum = 31700
	skips   = 31800
)

// Why a node cannot checkpoint. The kubelet's end-to-end tests look for these words in an error,
// and take any other error for a failure.
const (
	disabled = "criu support is disabled by configuration"
	missing  = "checkpoint/restore requires at least CRIU 3.17"
)

// Refuse returns the error of a runtime that cannot checkpoint, in the same words.
func Refuse(why string) error {
	return fmt.Errorf("%s and a runtime that uses it: %s: %w", missing, why, fault.Unimplemented)
}

// Program is criu as the configuration names it. Its methods may be called concurrently.
type Program struct {
	path string // empty: there are no checkpoints

	mu     sync.Mutex
	tested identity // of the file that Ready found to work
	found  Found
}

// Found is a criu that works on this node.
type Found struct {
	Path    string
	Version string // such as 4.2.1
	number  int
}

type identity struct {
	path     string
	dev, ino uint64
	size     int64
	mtime    unix.Timespec
}

// New returns the program at path, or of that name in PATH. An empty path means that the operator
// wants no checkpoints.
func New(path string) *Program { return &Program{path: path} }

// checkTime bounds a run of criu that only looks at the node; it takes a tenth of a second.
const checkTime = 20 * time.Second

// Ready returns a criu that works on this node: new enough, and content with the kernel. It asks
// again only when the file has changed. The error is fault.Unimplemented and has the words by
// which the kubelet's tests know a node without checkpoints.
func (p *Program) Ready(ctx context.Context) (Found, error) {
	if err := p.Enabled(); err != nil {
		return Found{}, err
	}
	path, err := exec.LookPath(p.path)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	var st unix.Stat_t
	if err == nil {
		err = unix.Stat(path, &st)
	}
	if err != nil {
		return Found{}, fmt.Errorf("%s: %w: install criu or correct runtime.criu: %w", missing, err, fault.Unimplemented)
	}
	if filepath.Base(path) != "criu" {
		return Found{}, fmt.Errorf("%s: runtimes search for a program with the name criu, which %s has not: set runtime.criu to one that has: %w", missing, path, fault.Unimplemented)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := identity{path, st.Dev, st.Ino, st.Size, st.Mtim}
	if p.tested == now {
		return p.found, nil
	}
	found, err := test(ctx, path)
	if err != nil {
		return Found{}, err
	}
	p.tested, p.found = now, found
	return found, nil
}

// Enabled returns an error if the operator wants no checkpoints, whoever makes them.
func (p *Program) Enabled() error {
	if p.path == "" {
		return fmt.Errorf("%s: runtime.criu is empty: %w", disabled, fault.Unimplemented)
	}
	return nil
}

// test asks criu for its version, and whether the kernel has what it needs.
func test(ctx context.Context, path string) (Found, error) {
	said, err := run(ctx, path, "--version")
	if err != nil {
		return Found{}, fmt.Errorf("%s: %s --version: %w: %w", missing, path, err, fault.Unimplemented)
	}
	version, number := parseVersion(said)
	if number < minimum {
		return Found{}, fmt.Errorf("%s: %s is version %q: install a newer one: %w", missing, path, version, fault.Unimplemented)
	}
	if said, err := run(ctx, path, "check"); err != nil {
		return Found{}, fmt.Errorf("%s that works on this kernel: %s %s check: %w: %s: install a newer criu: %w",
			missing, path, version, err, firstError(said), fault.Unimplemented)
	}
	return Found{path, version, number}, nil
}

// parseVersion reads the line "Version: 4.2.1", and returns the version and its number as criu
// counts: 40201.
func parseVersion(said string) (version string, number int) {
	for line := range strings.Lines(said) {
		if text, ok := strings.CutPrefix(line, "Version: "); ok {
			version = strings.TrimSpace(text)
		}
	}
	for i, part := range strings.SplitN(version, ".", 3) {
		n, _ := strconv.Atoi(part)
		number += n * []int{10000, 100, 1}[i]
	}
	return version, number
}

// harmless are words of errors after which criu continues: without CAP_SYS_RESOURCE it cannot raise its
// limit of open files.
const harmless = "rlimit: Can't setup RLIMIT_NOFILE"

// findError returns the first error in criu's output, which names the cause; those that follow
// from it come later. Without one it is empty.
func findError(said string) string {
	for line := range strings.Lines(said) {
		if i := strings.Index(line, "Error ("); i >= 0 && !strings.Contains(line, harmless) {
			return strings.TrimSpace(line[i:])
		}
	}
	return ""
}

// hints say what is behind errors of criu, by words in them, where its own say it only to those who know criu.
var hints = []struct{ words, hint string }{
	{"Unsupported proto 262", "a socket of MPTCP, which criu cannot dump; programs built with Go 1.24 or later listen with it unless their environment has GODEBUG=multipathtcp=0"},
	{"Can't get rlimit", "criu needs CAP_SYS_RESOURCE on the node for processes of other users than root"},
	{"send_fds failed", "a file that no process can pass on, such as one of io_uring, which criu cannot dump"},
	{"Can't lookup mount", "a process has a file open that is of no mount of its container, such as one that it got from a process of the node"},
	{"found while seizing", "a process is under a debugger, or was ending"},
	{"Cannot assign requested address", "a socket is bound to the address of the pod that was dumped, and the restored pod has another one"},
}

// explained adds a hint to an error of criu.
func explained(said string) string {
	for _, h := range hints {
		if strings.Contains(said, h.words) {
			return said + " (" + h.hint + ")"
		}
	}
	return said
}

// firstError is findError, or the beginning of an output without an error.
func firstError(said string) string {
	if text := findError(said); text != "" {
		return text
	}
	if len(said) > 200 {
		said = said[:200]
	}
	return strings.ToValidUTF8(strings.TrimSpace(said), "?")
}

const maxSaid = 64 << 10

func run(ctx context.Context, path string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir, cmd.Env, cmd.WaitDelay = "/", inherit.Environ(), time.Second
	out := &capture.Head{Max: maxSaid}
	cmd.Stdout, cmd.Stderr = out, out
	err := inherit.Start(cmd.Run)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return string(out.Bytes()), err
}

// Environ returns the variables with which a runtime finds this criu and no other: runtimes have no
// option for its path.
func (f Found) Environ() []string {
	return []string{"PATH=" + filepath.Dir(f.Path) + ":" + os.Getenv("PATH")}
}

// LogError returns the first error in a log of criu, empty if there is none, and whether it says that
// the disk is full. Logs of processes with much memory or many files have many megabytes before it.
func LogError(file string) (text string, full bool) {
	f, err := os.Open(file)
	if err != nil {
		return "", false
	}
	defer f.Close()
	const longest = 64 << 10 // bytes of a line that are looked at
	for lines := bufio.NewReaderSize(f, longest); ; {
		line, rest, err := lines.ReadLine()
		if err != nil {
			return explained(text), full
		}
		said := string(line)
		for rest && err == nil {
			_, rest, err = lines.ReadLine()
		}
		if text == "" {
			text = findError(said)
		}
		full = full || strings.Contains(said, "No space left on device")
	}
}

// WriteRestoreOptions writes the options for a restore in the same way. criu runs holder at each step. TCP
// connections of the checkpoint are closed.
func (f Found) WriteRestoreOptions(file, holder string) error {
	return writeOptions(file, "# Written by crius before the restore.", "file-locks", "tcp-close", "action-script "+holder)
}

// WriteOptions writes the options for a dump of a container to the file that Annotation names. With
// connections, TCP connections are kept, and criu locks the network of the pod meanwhile.
func (f Found) WriteOptions(file string, connections bool) error {
	lines := []string{
		"# Written by crius before each dump.",
		"file-locks",
		"ghost-limit " + strconv.Itoa(64<<20), // bytes of a deleted file that is still open
	}
	switch {
	case connections: // nftables needs no iptables of the node's that works in the pod's network namespace
		lines = append(lines, "tcp-established", "network-lock nftables")
	case f.number >= skips:
		lines = append(lines, "network-lock skip")
	}
	return writeOptions(file, lines...)
}

func writeOptions(file string, lines ...string) error {
	err := os.Remove(file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	to, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = to.WriteString(strings.Join(lines, "\n") + "\n")
	return errors.Join(err, to.Close())
}
