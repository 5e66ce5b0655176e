// Package unpack has the layers of an image unpacked into containers/storage by a process of its
// own, confined and without a network, to which the server passes the downloads. This is the
// server's side. The process is crius-unpack (package worker) or, if only containers/image knows
// the format of a layer, crius itself (package copier); package wire is the protocol. See
// docs/pull.md.
//
// In the process, package layers takes a layer from its archive to the store, and package extract
// makes its files.
package unpack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"go.podman.io/storage/pkg/reexec"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/programs"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/unpack/copier"
	"github.com/crius-run/crius/storage/unpack/wire"
)

// Register tells the reexec of containers/storage which programs of this package crius itself is.
func Register() {
	reexec.Register(copier.Name, copier.Main)
	reexec.Register(featuresName, findFeatures)
}

// Program is crius-unpack as it was when it was opened: if a package replaces it, the server still
// starts the program of its own version.
type Program struct {
	file     *os.File
	empty    *os.File // a room without dirs
	roomless error    // why there is none
	dirs     []string // that it needs

	making sync.Mutex
	made   room
	warned sync.Once
}

// FindProgram finds the program beside the running one, or else in PATH. The error is
// fault.Precondition.
func FindProgram() (path string, err error) {
	if path, err = programs.Find(wire.Name, programs.Dir()); err != nil {
		return "", fmt.Errorf("crius-unpack not found in the directory of crius or in PATH: install it and restart crius: %w", fault.Precondition)
	}
	return path, nil
}

// CheckProgram starts the program, and says why it cannot unpack images for this server. The error
// is fault.Precondition.
func CheckProgram(ctx context.Context, path string) error {
	const patience = 30 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	said, err := exec.CommandContext(ctx, path, wire.VersionFlag).Output()
	if failed := new(exec.ExitError); errors.As(err, &failed) {
		err = fmt.Errorf("%w: %s", err, pullerror.Cut(strings.TrimSpace(string(failed.Stderr))))
	}
	if err != nil {
		return fmt.Errorf("cannot run %s, or it is of another version than crius: %w: %w", path, err, fault.Precondition)
	}
	if said := strings.TrimSpace(string(said)); said != wire.Version() {
		return fmt.Errorf("%s says %q where %q is needed, so it is of another version than crius: %w",
			path, pullerror.Cut(said), wire.Version(), fault.Precondition)
	}
	return nil
}

// OpenProgram opens the program, which is to find the directories dirs, and nothing else of the node. The caller must Close it.
func OpenProgram(path string, dirs ...string) (*Program, error) {
	file, err := os.OpenFile(path, unix.O_PATH, 0)
	if err != nil {
		return nil, err
	}
	p := &Program{file: file, dirs: dirs}
	p.empty, p.roomless = makeEmptyRoom(path, file)
	return p, nil
}

// Close closes the program, which can no longer be started. It may be called on nil.
func (p *Program) Close() error {
	if p == nil {
		return nil
	}
	for _, room := range []*os.File{p.empty, p.made.namespace} {
		_ = room.Close() // if there is one
	}
	return p.file.Close()
}

// command returns a command that starts the program in a room, which the caller must close. If the node can have none, the room is
// nil, and the program is started by its descriptor, which the worker inherits.
func (p *Program) command(ctx context.Context, files ...*os.File) (cmd *exec.Cmd, room *os.File) {
	path := roomProgram
	room, err := p.room()
	if err != nil {
		p.warned.Do(func() {
			slog.WarnContext(ctx, "pull workers have no mount namespace of their own: a layer that takes one over could change modes and owners of all files of the node (docs/pull.md, Confinement)", "err", err)
		})
		path = fmt.Sprintf("/proc/self/fd/%d", wire.ProgramFD)
		files = append(files, p.file)
	}
	cmd = exec.CommandContext(ctx, path)
	cmd.Args, cmd.ExtraFiles = []string{wire.Name}, files
	return cmd, room
}
