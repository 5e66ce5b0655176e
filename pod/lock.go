package pod

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/flock"
	"github.com/crius-run/crius/internal/owner"
)

// ForkTime is far more than a forked copy of a process takes until it executes its program,
// even on an overloaded machine. If a server is killed meanwhile, the copy still holds
// everything that the server had open, such as its lock and its listening socket.
const ForkTime = 10 * time.Second

// Lock ensures that only one server at a time works on a state directory. A server takes it
// first, since opening the rest also cleans up after its predecessor. The kernel releases the
// lock when the process and its forked copies have ended. If another server holds it for longer
// than limit, the error is fault.Precondition.
func Lock(ctx context.Context, stateDir string, limit time.Duration) (io.Closer, error) {
	if err := os.MkdirAll(stateDir, 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(stateDir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err = flock.TryUntil(ctx, f, 5*time.Millisecond)
	if errors.Is(err, flock.ErrBusy) {
		err = fmt.Errorf("%s is locked by %s, which serves this state directory; stop it or set a different root: %w", path, owner.Owner{PID: flock.Holder(f)}, fault.Precondition)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// LockRun ensures that only one server uses a run root, since another one would remove what is
// in it. The caller holds the Lock of the state directory. If the run root belongs to another
// crius, the error is an *owner.TakenError.
func LockRun(ctx context.Context, runDir, stateDir string, limit time.Duration) (io.Closer, error) {
	if err := os.MkdirAll(runDir, 0o711); err != nil {
		return nil, err
	}
	lock, err := owner.Take(ctx, filepath.Join(runDir, "lock"), stateDir, limit)
	if err != nil {
		return nil, runTaken(runDir, err)
	}
	return lock, nil
}

// RunIsOurs returns an error if the run root belongs to the server of another state
// directory.
func RunIsOurs(runDir, stateDir string) error {
	return runTaken(runDir, owner.Look(filepath.Join(runDir, "lock"), stateDir))
}

func runTaken(runDir string, err error) error {
	if taken := new(owner.TakenError); errors.As(err, &taken) {
		return fmt.Errorf("run root %s: %w: %s", runDir, err, taken.Remedy("run_root"))
	}
	return err
}
