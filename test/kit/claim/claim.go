// Package claim gives a test run its own names for what outlives a process:
// cgroups and a short directory. A later run can remove everything with such a
// name if the owner was killed before it could do so itself.
//
// A claim lasts as long as its owner holds a lock on a file beside the
// directory. Locks are visible across PID and mount namespaces and end with the
// process in any case; neither is true of a pid or a time stamp.
package claim

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/crius-run/crius/internal/flock"
)

// parent holds the directories. A node's sockets are below them, and the path
// of a socket has at most 107 bytes.
var parent = "/tmp"

// Claim is a name that nothing else on this machine has.
type Claim struct {
	ID  string // such as crabc234
	Dir string // not made yet: the caller may make it

	lock *os.File
}

// New claims a name.
func New() (*Claim, error) {
	for {
		id := "cr" + strings.ToLower(rand.Text()[:6])
		c, err := take(filepath.Join(parent, id), os.O_CREATE)
		if !errors.Is(err, errTaken) {
			return c, err
		}
	}
}

// errTaken means that another process has a claim, or that it is gone.
var errTaken = errors.New("claim is taken")

// take locks the claim of a directory.
func take(dir string, flags int) (*Claim, error) {
	path := dir + lockSuffix
	lock, err := os.OpenFile(path, os.O_RDWR|flags, 0o600)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errTaken
	}
	if err != nil {
		return nil, fmt.Errorf("claim %s: %w", dir, err)
	}
	if flock.Try(lock) != nil || !isAt(lock, path) {
		lock.Close()
		return nil, errTaken
	}
	return &Claim{ID: filepath.Base(dir), Dir: dir, lock: lock}, nil
}

const lockSuffix = ".lock"

// isAt reports whether a file still has its name: the last owner of a claim
// removes the file before it releases the lock.
func isAt(file *os.File, path string) bool {
	now, err := os.Stat(path)
	mine, mineErr := file.Stat()
	return err == nil && mineErr == nil && os.SameFile(now, mine)
}

// Release removes everything with the name, and releases the name. If something
// cannot be removed the name stays, so that [Sweep] can try again.
func (c *Claim) Release() error {
	defer c.lock.Close()
	if err := c.scrub(); err != nil {
		return fmt.Errorf("remove what is left of %s: %w", c.ID, err)
	}
	return os.Remove(c.Dir + lockSuffix)
}

// Sweep releases the claims of owners that have ended and returns their names.
func Sweep() (ids []string, err error) {
	locks, err := filepath.Glob(filepath.Join(parent, "cr??????"+lockSuffix))
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, path := range locks {
		c, err := take(strings.TrimSuffix(path, lockSuffix), 0)
		if errors.Is(err, errTaken) {
			continue
		}
		if err == nil {
			ids = append(ids, c.ID)
			err = c.Release()
		}
		errs = append(errs, err)
	}
	return ids, errors.Join(errs...)
}
