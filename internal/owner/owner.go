// Package owner assigns a directory to one crius and records which.
//
// Two servers may run on a node, each with its own root. A directory that they
// share by mistake, such as an image store or a run root, must not be used by
// both: each would release and delete what it does not know. The owner of such
// a directory holds a lock on a file in it, and writes its name into the file.
// The name outlives the lock: containers continue without their server, so the
// directory keeps belonging to the root of those containers.
//
// The lock is a record lock (fcntl(2)): it belongs to the process, ends with it
// in any case, and is not inherited by forked copies. A process loses it when
// it closes any descriptor of the file, so the process that holds the lock must
// not call Look.
package owner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/internal/poll"
)

// Owner identifies the crius that owns a directory.
type Owner struct {
	Root  string    `json:"root"` // its state root, by which it is identified
	PID   int       `json:"pid"`
	Since time.Time `json:"since"` // when the process took the directory
}

// String names the owner for people, without unknown parts.
func (o Owner) String() string {
	text := "another crius instance"
	if o.Root != "" {
		text += " (root " + o.Root + ")"
	}
	if o.PID > 0 {
		text += fmt.Sprintf(", process %d", o.PID)
	}
	return text
}

// TakenError means that a directory belongs to another crius. It is
// fault.Precondition.
type TakenError struct {
	Owner   Owner
	Running bool // otherwise only its pods or containers exist, without their server
}

func (e *TakenError) Error() string {
	if e.Running {
		return "in use by " + e.Owner.String()
	}
	return fmt.Sprintf("in use by pods and containers of another crius instance (root %s), which is not running", e.Owner.Root)
}

func (e *TakenError) Unwrap() error { return fault.Precondition }

// Remedy returns what an operator can do about it; option is the option that
// names the directory.
func (e *TakenError) Remedy(option string) string {
	if e.Running {
		return "stop that instance, or set a different " + option + " for this one"
	}
	return fmt.Sprintf("start that instance, remove its pods and containers by running crius wipe with its configuration, or set a different %s for this one", option)
}

// Lock is held by an owner until it closes it.
type Lock struct{ file *os.File }

// Close lets another process of the same owner take the directory, and any
// other process once nothing of the owner is in it. Close is idempotent, also
// on nil.
func (l *Lock) Close() error {
	if l == nil {
		return nil
	}
	if err := l.file.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Lost returns, as a *TakenError, which other crius has the directory by now:
// the lock is on a file, which may have been deleted. The error does not name
// the process, so that it stays the same as long as that crius has the
// directory.
func (l *Lock) Lost() error {
	if l == nil || named(l.file, l.file.Name()) {
		return nil
	}
	err := Look(l.file.Name(), read(l.file).Root)
	if taken := new(TakenError); errors.As(err, &taken) {
		taken.Owner.PID = 0
	}
	return err
}

// Take makes the crius of a root the owner of the directory in which path will
// be the lock. If another crius owns it, and runs or has pods or containers on
// record, the error is a *TakenError. Take waits up to limit for a process of
// the same root that holds the lock, because a killed process may take a moment
// to end.
func Take(ctx context.Context, path, root string, limit time.Duration) (l *Lock, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	poll.Until(ctx, 10*time.Millisecond, func() bool {
		l, err = take(path, root)
		taken := new(TakenError)
		return !errors.As(err, &taken) || !taken.ours(root)
	})
	return l, err
}

// ours reports whether the owner may be an earlier process of the same root.
func (e *TakenError) ours(root string) bool {
	return e.Running && (e.Owner.Root == "" || Real(e.Owner.Root) == Real(root))
}

func take(path, root string) (_ *Lock, err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	last := read(f)
	err = unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EAGAIN) {
		last.PID, _ = holder(f)
		return nil, &TakenError{last, true}
	} else if err != nil {
		return nil, &os.PathError{Op: "lock", Path: path, Err: err}
	}
	if !named(f, path) { // its last owner has removed it in the meantime, with everything that it owned
		_ = f.Close()
		return take(path, root)
	}
	root = Real(root)
	if last = read(f); stillOwns(last, root) {
		return nil, &TakenError{last, false}
	}
	if err := write(f, Owner{root, os.Getpid(), time.Now()}); err != nil && last.Root != root { // otherwise a full disk must not prevent it
		return nil, &os.PathError{Op: "write owner", Path: path, Err: err}
	}
	return &Lock{f}, nil
}

// Look returns the error with which Take would fail now for root, and changes
// nothing. Neither a process of the same root nor a directory without an owner
// is an error.
func Look(path, root string) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer f.Close()
	last, root := read(f), Real(root)
	if pid, locked := holder(f); locked && last.Root != "" && Real(last.Root) != root { // "": a version that wrote nothing
		last.PID = pid
		return &TakenError{last, true}
	}
	if stillOwns(last, root) {
		return &TakenError{last, false}
	}
	return nil
}

// Real returns the path of a root with links resolved.
func Real(root string) string {
	if root == "" {
		return ""
	}
	if abs, err := filepath.Abs(root); err == nil {
		root = abs
	}
	if real, err := filepath.EvalSymlinks(root); err == nil {
		return real
	}
	return root
}

// stillOwns reports whether the last owner is another root and still has pods or containers.
func stillOwns(last Owner, root string) bool {
	if last.Root == "" || Real(last.Root) == root { // a root that was moved may have left a link
		return false
	}
	for _, kind := range []string{"pods", "containers"} {
		entries, err := os.ReadDir(filepath.Join(last.Root, kind))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return true // unknown
		}
		for _, entry := range entries {
			if ids.Valid(entry.Name()) {
				return true
			}
		}
	}
	return false
}

// holder returns the process that has locked the file, if any. Its id is 0 if
// it is in another PID namespace.
func holder(f *os.File) (pid int, locked bool) {
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock); err != nil || lock.Type == unix.F_UNLCK {
		return 0, false
	}
	return max(int(lock.Pid), 0), true
}

// named reports whether the open file is the one at path.
func named(f *os.File, path string) bool {
	here, err := f.Stat()
	there, pathErr := os.Stat(path)
	return err == nil && pathErr == nil && os.SameFile(here, there)
}

// read returns the zero Owner for an empty file: earlier versions left it
// empty, and so does a power cut.
func read(f *os.File) Owner {
	var o Owner
	text, err := io.ReadAll(io.NewSectionReader(f, 0, 64<<10))
	if err != nil || json.Unmarshal(text, &o) != nil {
		return Owner{}
	}
	return o
}

// write changes the file in place: the lock is on this file, not on its name.
func write(f *os.File, o Owner) error {
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	if _, err := f.WriteAt(append(text, '\n'), 0); err != nil {
		return err
	}
	return f.Truncate(int64(len(text) + 1))
}
