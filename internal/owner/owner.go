// Package owner gives a directory to one crius, and says to which.
//
// Two servers may run on a node, and each has its own root. What they share by
// mistake, an image store or a run root, must not be used by both: each would
// release and sweep what it does not know of. The owner of such a directory
// holds a lock on a file in it, and writes its name into the file. The name
// outlives the lock: containers run on without their server, so a directory
// stays that of the root whose containers are in it.
//
// The lock is a record lock (fcntl(2)): it belongs to the process, ends with it
// however that ends, and is not inherited by forked copies. A process loses it
// with the first descriptor of the file that it closes, so Look is not for the
// process that holds the lock.
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

// Owner is the crius that a directory belongs to.
type Owner struct {
	Root  string    `json:"root"` // its state root, which names it
	PID   int       `json:"pid"`
	Since time.Time `json:"since"` // when the process took the directory
}

// String names the owner for people. What is not known of it is left out.
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

// TakenError says that a directory belongs to another crius. It is
// fault.Precondition.
type TakenError struct {
	Owner   Owner
	Running bool // else its pods or containers are there, and its server is not
}

func (e *TakenError) Error() string {
	if e.Running {
		return "in use by " + e.Owner.String()
	}
	return fmt.Sprintf("in use by pods and containers of another crius instance (root %s), which is not running", e.Owner.Root)
}

func (e *TakenError) Unwrap() error { return fault.Precondition }

// Remedy is what a person can do about it; option is the one that names the
// directory.
func (e *TakenError) Remedy(option string) string {
	if e.Running {
		return "stop that instance, or set a different " + option + " for this one"
	}
	return fmt.Sprintf("start that instance, remove its pods and containers by running crius wipe with its configuration, or set a different %s for this one", option)
}

// Lock is what an owner holds until it closes it.
type Lock struct{ file *os.File }

// Close lets another process of the same owner take the directory, and any other
// once nothing of the owner is in it. It may be repeated, also on nil.
func (l *Lock) Close() error {
	if l == nil {
		return nil
	}
	if err := l.file.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Lost says which other crius has the directory by now, as a *TakenError: the lock
// is on a file, and somebody may have deleted that. The error does not name the
// process, so that it stays the same as long as that crius has the directory.
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

// Take makes the crius of a root the owner of the directory in which path is to
// be the lock. If another one is, and runs or has pods or containers on record,
// the error is a *TakenError. A process of the same root that holds the lock is
// waited for as long as limit, since one that was killed may take a moment to
// end.
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

// ours tells whether the owner may be an earlier process of the same root.
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
	if !named(f, path) { // its last owner has removed it meanwhile, with all that it owned
		_ = f.Close()
		return take(path, root)
	}
	root = Real(root)
	if last = read(f); stillOwns(last, root) {
		return nil, &TakenError{last, false}
	}
	if err := write(f, Owner{root, os.Getpid(), time.Now()}); err != nil && last.Root != root { // else a full disk is no reason
		return nil, &os.PathError{Op: "write owner", Path: path, Err: err}
	}
	return &Lock{f}, nil
}

// Look says why root could not be made the owner now, as Take does, and changes
// nothing. A process of the same root is no reason, nor is a directory that
// nobody has.
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

// Real is the name of a root, whatever links lead there.
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
			return true // it cannot be told
		}
		for _, entry := range entries {
			if ids.Valid(entry.Name()) {
				return true
			}
		}
	}
	return false
}

// holder is the process that has the file locked, if one has. Its id is 0 if it
// is in another PID namespace.
func holder(f *os.File) (pid int, locked bool) {
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock); err != nil || lock.Type == unix.F_UNLCK {
		return 0, false
	}
	return max(int(lock.Pid), 0), true
}

// named tells whether the open file is the one at path.
func named(f *os.File, path string) bool {
	here, err := f.Stat()
	there, pathErr := os.Stat(path)
	return err == nil && pathErr == nil && os.SameFile(here, there)
}

// read returns nothing of a file that says nothing: versions before this one
// left it empty, and so does a power cut.
func read(f *os.File) Owner {
	var o Owner
	text, err := io.ReadAll(io.NewSectionReader(f, 0, 64<<10))
	if err != nil || json.Unmarshal(text, &o) != nil {
		return Owner{}
	}
	return o
}

// write changes the file in place: the lock is on this file, and not on its name.
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
