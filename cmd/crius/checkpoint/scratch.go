package checkpoint

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/flock"
	"github.com/crius-run/crius/internal/tree"
	"github.com/crius-run/crius/storage/checkpoint/remote"
)

// podName is the name of a checkpoint in a scratch directory.
const podName = "pod"

// scratch is a directory of one run of crius, which locks it. Another run removes those that nobody has locked.
type scratch struct {
	path string
	lock *os.File
}

// newScratch makes a scratch directory, and removes those of runs that were killed.
func newScratch(ctx context.Context, root string) (*scratch, error) {
	root, err := filepath.EvalSymlinks(root) // the server follows none
	if err != nil {
		return nil, err
	}
	all := filepath.Join(root, remote.Transfers)
	leave, err := enter(ctx, root)
	if err != nil {
		return nil, err
	}
	defer leave()
	if err := os.Mkdir(all, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	if err := sweep(all); err != nil {
		return nil, err
	}
	path, err := os.MkdirTemp(all, "")
	if err != nil {
		return nil, err
	}
	s := &scratch{path: path}
	if s.lock, err = openDirectory(path); err == nil {
		err = flock.Try(s.lock)
	}
	if err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	return s, nil
}

// enter keeps other runs from making and removing scratch directories until leave is called: a directory that is not
// locked then belongs to no run.
func enter(ctx context.Context, root string) (leave func(), err error) {
	gate, err := openDirectory(root)
	if err != nil {
		return nil, err
	}
	if err := flock.TryUntil(ctx, gate, period); err != nil {
		return nil, errors.Join(err, gate.Close())
	}
	return func() { _ = flock.Release(gate) }, nil
}

// remove removes the directory with all that is in it, and the one above if it was the last. A server that still
// writes a checkpoint there, after an interruption, cannot do so any more, and fails.
func (s *scratch) remove(ctx context.Context) error {
	err := tree.Remove(s.path)
	for range 10 {
		if !errors.Is(err, unix.ENOTEMPTY) { // else the server has just made a file
			break
		}
		err = tree.Remove(s.path)
	}
	err = errors.Join(err, flock.Release(s.lock))
	all := filepath.Dir(s.path)
	leave, enterErr := enter(context.WithoutCancel(ctx), filepath.Dir(all))
	if enterErr != nil {
		return errors.Join(err, enterErr)
	}
	defer leave()
	if last := os.Remove(all); last != nil && !errors.Is(last, unix.ENOTEMPTY) && !errors.Is(last, os.ErrNotExist) {
		err = errors.Join(err, last)
	}
	return err
}

// sweep removes directories that neither a run nor a server uses.
func sweep(all string) error {
	entries, err := os.ReadDir(all)
	for _, e := range entries {
		path := filepath.Join(all, e.Name())
		if used, lockErr := inUse(path, filepath.Join(path, podName)); lockErr != nil || used {
			err = errors.Join(err, lockErr)
			continue
		}
		err = errors.Join(err, tree.Remove(path))
	}
	return err
}

// inUse reports whether somebody has locked one of these directories. The server locks one to which it writes a
// checkpoint, and may do so for longer than the run that asked for it lives.
func inUse(paths ...string) (bool, error) {
	for _, path := range paths {
		f, err := openDirectory(path)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
			continue
		}
		if err != nil {
			return false, err
		}
		err = errors.Join(flock.Try(f), f.Close())
		if errors.Is(err, flock.ErrBusy) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
	}
	return false, nil
}

func openDirectory(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}
