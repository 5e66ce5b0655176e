package containerd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/crius-run/crius/internal/flock"
	"github.com/crius-run/crius/test/kit/wait"
)

const (
	// machineSocket is where the machine's own containerd listens.
	machineSocket = "/run/containerd/containerd.sock"
	// shimSockets is where the shims of every containerd on the machine listen,
	// wherever it has its state.
	shimSockets = "/run/containerd/s"
)

// shims distinguishes the sockets of a containerd's shims from those that
// existed before.
type shims struct {
	dir    string
	before []string // nil: the directory did not exist
	lock   *os.File
}

// noteShims refuses a machine with a running containerd, or another one of this
// package, whose shims come and go meanwhile. It recognizes the latter by a
// lock on the program.
func noteShims(dir, daemon, program string) (s shims, err error) {
	if answers(daemon) {
		return s, fmt.Errorf("a containerd answers at %s: use a machine that does without, or stop it first", daemon)
	}
	if s.lock, err = os.Open(program); err != nil {
		return s, fmt.Errorf("%w: install containerd", err)
	}
	if err := flock.Try(s.lock); err != nil {
		s.lock.Close()
		return s, fmt.Errorf("%w: another bench or cluster runs it on this machine", err)
	}
	s.dir = dir
	s.before, err = namesIn(dir)
	return s, err
}

// remove removes what dead shims have left. It fails for a live one.
func (s shims) remove() error {
	defer s.lock.Close()
	names, err := namesIn(s.dir)
	if err != nil || names == nil {
		return err
	}
	var errs []error
	for _, name := range names {
		if slices.Contains(s.before, name) {
			continue
		}
		socket := filepath.Join(s.dir, name)
		if !wait.Until(context.Background(), func() bool { return !answers(socket) }) {
			errs = append(errs, fmt.Errorf("a shim of containerd lives, and listens at %s", socket))
			continue
		}
		if err := os.Remove(socket); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if s.before == nil && errors.Join(errs...) == nil {
		errs = append(errs, os.Remove(s.dir))
	}
	return errors.Join(errs...)
}

// namesIn returns nil if the directory does not exist.
func namesIn(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	names := []string{}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names, err
}

func answers(socket string) bool {
	conn, err := net.DialTimeout("unix", socket, time.Second)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}
