package download

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/flock"
)

// Name is the name of the directory.
const Name = "crius-downloads"

// Limits bound what is kept while no pull needs it.
type Limits struct {
	Age   time.Duration // since the last byte came
	Files int
	Share int64 // of the bytes that are free on the disk: one part in so many
}

// DefaultLimits keep files overnight, and leave the room that pulls and containers need.
var DefaultLimits = Limits{Age: 24 * time.Hour, Files: 512, Share: 4}

// Dir is a directory of downloads. Several processes may use it. Its methods are safe for
// concurrent use.
//
// A compromised pull worker may have put anything into the directory, or in its place: Dir touches
// nothing outside of the parent.
type Dir struct {
	Limits Limits
	// Patience is how long a pull waits for another pull that gets no bytes of the same blob.
	Patience time.Duration
	// Connections is how many connections a pull may have. Large blobs come over the connections
	// that other blobs leave, in ranges of RangeSize bytes; 0 or 1: each blob comes over one.
	Connections atomic.Int64
	RangeSize   int64
	// Beside is another directory that is cleared as well when the disk of both is full; nil: there
	// is none.
	Beside *Dir

	parent string

	mu       sync.Mutex
	root     *os.Root         // of parent when it was last opened; nil before
	named    map[string]*part // files that pulls use, by name
	reserved map[string]int   // number of pulls that will use a file, by its name
	turns    map[string]int   // number of turns in a row that could not resume a file, by its name
	timer    *time.Timer      // of the next sweep, nil if nothing is kept
	spare    spare            // files that no pull uses, at least so many; nobody knows before the first sweep
	closed   bool
}

// spare is a number of files and of their bytes.
type spare struct {
	files int
	bytes int64
	known bool
}

// In returns the directory Name in parent, which Fetch creates. It reads and writes nothing yet.
func In(parent string) *Dir {
	return &Dir{Limits: DefaultLimits, Patience: 10 * time.Second, RangeSize: rangeSize, parent: parent, named: map[string]*part{}, reserved: map[string]int{}, turns: map[string]int{}}
}

// part is the file of a blob while pulls use it.
type part struct {
	name string // empty: the file has none, and is not kept
	turn chan struct{}
	file *os.File     // changed by the pull that has the turn; locked against other processes
	came atomic.Int64 // bytes, to see whether any come

	users    int  // pulls; guarded by the directory
	unpacked bool // likewise: pulls no longer need its name
	done     bool // likewise: a pull has used it as it wanted
}

// open opens the file of a blob, which pulls from one registry share. The file has no name, and is
// for this caller alone, if registry is empty, another process has the file locked, or the size of
// the blob is unknown.
func (d *Dir) open(info types.BlobInfo, registry string) (*part, error) {
	if err := info.Digest.Validate(); err != nil {
		return nil, err
	}
	name := fileName(info.Digest, registry)
	alone := registry == "" || info.Size <= 0
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.named[name]; p != nil && !alone {
		p.users++
		p.unpacked = false
		return p, nil
	}
	p := &part{turn: make(chan struct{}, 1), users: 1}
	root, err := d.opened()
	if err != nil {
		return nil, err
	}
	if err := makeDir(root); err != nil {
		return nil, err
	}
	if !alone {
		p.file, err = lockFile(root, file(name))
	}
	if alone || errors.Is(err, flock.ErrBusy) {
		p.file, err = nameless(root)
		return p, err
	}
	if err != nil {
		return nil, err
	}
	p.name = name
	d.named[name] = p
	return p, nil
}

// fileName returns a name with the registry in it, so that no registry can make up the beginning of
// another registry's blob.
func fileName(blob digest.Digest, registry string) string {
	return fmt.Sprintf("%s-%s-%.32s", blob.Algorithm(), blob.Encoded(), digest.FromString(registry).Encoded())
}

// file returns the path of a file below the root.
func file(name string) string { return filepath.Join(Name, name) }

// makeDir makes the directory if it does not exist. A file in its place is removed.
func makeDir(root *os.Root) error {
	if info, err := root.Lstat(Name); err == nil && !info.IsDir() {
		if err := root.Remove(Name); err != nil {
			return err
		}
	}
	return root.MkdirAll(Name, 0o700)
}

// opened returns the root. If another directory has replaced the parent, and no pull uses named
// files in the former, it returns the new one.
func (d *Dir) opened() (*os.Root, error) {
	if d.root != nil && (len(d.named) > 0 || d.isParent()) {
		return d.root, nil
	}
	root, err := os.OpenRoot(d.parent)
	if err != nil {
		return nil, err
	}
	if d.root != nil {
		_ = d.root.Close()
	}
	d.root = root
	return root, nil
}

func (d *Dir) isParent() bool {
	opened, err := d.root.Stat(".")
	if err != nil {
		return false
	}
	there, err := os.Stat(d.parent)
	return err == nil && os.SameFile(opened, there)
}

// nameless makes a file without a name. If the file system can do so, it can be given a name later.
func nameless(root *os.Root) (*os.File, error) {
	dir, err := root.Open(Name)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	fd, err := unix.Openat(int(dir.Fd()), ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), "download"), nil
	}
	name := file("once-" + rand.Text())
	f, err := root.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	return f, root.Remove(name)
}

// scratch makes a file that disappears when it is closed.
func (d *Dir) scratch() (*os.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	root, err := d.opened()
	if err != nil {
		return nil, err
	}
	return nameless(root)
}

// lockFile opens a file, creates it if there is none, and locks it until it is closed. Anything
// else in its place is removed.
func lockFile(root *os.Root, path string) (*os.File, error) {
	for range 10 { // other processes delete files that are not locked
		if info, err := root.Lstat(path); err == nil && !info.Mode().IsRegular() {
			if err := root.RemoveAll(path); err != nil {
				return nil, err
			}
		}
		f, err := root.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NONBLOCK, 0o600)
		if err != nil {
			return nil, err
		}
		if err := flock.Try(f); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if sameFile(root, f, path) {
			return f, nil
		}
		_ = flock.Release(f) // it was deleted meanwhile
	}
	return nil, fmt.Errorf("%s is deleted time and again", path)
}

func sameFile(root *os.Root, f *os.File, path string) bool {
	opened, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := root.Lstat(path)
	return err == nil && os.SameFile(opened, there)
}

// fruitless notes whether a turn that resumed a file got anything, and returns how many turns in a
// row got nothing.
func (d *Dir) fruitless(p *part, came bool) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if came || p.name == "" {
		delete(d.turns, p.name)
		return 0
	}
	d.turns[p.name]++
	return d.turns[p.name]
}

// replace gives the part an empty file. Readers of the former file keep it.
func (d *Dir) replace(p *part) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	root, err := d.opened()
	if err != nil {
		return err
	}
	delete(d.turns, p.name)
	old := p.file
	if p.name == "" {
		p.file, err = nameless(root)
	} else if err = root.RemoveAll(file(p.name)); err == nil {
		p.file, err = lockFile(root, file(p.name))
	}
	if err != nil {
		p.file = old
		return fmt.Errorf("file for the download: %w", err)
	}
	return flock.Release(old)
}

// size returns the size of the file. The caller has the turn or holds mu.
func (p *part) size() (int64, error) {
	info, err := p.file.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// has reports whether the file has byte b at an offset.
func (p *part) has(b byte, at int64) (bool, error) {
	var stored [1]byte
	_, err := p.file.ReadAt(stored[:], at)
	return err == nil && stored[0] == b, err
}

// unpacked notes that the layer of a part is in the store. As long as the file can be kept in any case,
// the directory is not read: an image may have a hundred layers.
func (d *Dir) unpacked(p *part) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p.unpacked = p.users == 1; !p.unpacked {
		return
	}
	size, err := p.size()
	d.spare.files++
	d.spare.bytes += size
	var disk unix.Statfs_t
	if err == nil {
		err = unix.Statfs(d.parent, &disk)
	}
	if err != nil || !d.spare.known || d.spare.files > d.Limits.Files || d.spare.bytes > d.share(&disk) {
		d.sweep()
	}
}

// release ends the use of parts by a pull, and its reservations. A file that no pull uses any more
// is kept if the last of them asks for that, unless one of them was done with it.
func (d *Dir) release(parts []*part, reserved []string, keep, done bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, name := range reserved {
		if d.reserved[name]--; d.reserved[name] == 0 {
			delete(d.reserved, name)
		}
	}
	for _, p := range parts {
		p.done = p.done || done
		if p.users--; p.users > 0 {
			continue
		}
		if size, err := p.size(); p.name != "" && d.reserved[p.name] == 0 && (!keep || p.done || err != nil || size == 0) {
			d.remove(p.name)
		}
		delete(d.named, p.name)
		_ = flock.Release(p.file) // nobody relies on what is written
	}
	d.sweep()
}

// remove deletes a file that no pull uses, or whose name no pull needs.
func (d *Dir) remove(name string) {
	delete(d.turns, name)
	root, err := d.opened()
	if err == nil {
		err = root.RemoveAll(file(name))
	}
	if err != nil {
		slog.Warn("cannot delete unfinished download; the next pull or start retries", "path", filepath.Join(d.parent, file(name)), "err", err)
	}
}

// Sweep deletes what exceeds the limits.
func (d *Dir) Sweep() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sweep()
}

// kept is a file that no pull uses.
type kept struct {
	name string
	size int64
	age  time.Duration // the clock may have been wrong
}

func (d *Dir) sweep() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	if d.closed {
		return
	}
	files, sum, room := d.unneeded()
	defer func() { d.spare = spare{len(files), sum, true} }()
	oldestFirst(files)
	for len(files) > 0 {
		oldest := files[0]
		if oldest.age <= d.Limits.Age && len(files) <= d.Limits.Files && sum <= room {
			d.timer = time.AfterFunc(d.Limits.Age-oldest.age+time.Second, d.Sweep)
			return
		}
		d.remove(oldest.name)
		sum -= oldest.size
		files = files[1:]
	}
}

func oldestFirst(files []kept) {
	slices.SortFunc(files, func(a, b kept) int { return cmp.Compare(b.age, a.age) })
}

// batch is how many entries of the directory are read at a time.
const batch = 512

// unneeded returns the files that no pull uses, the sum of their sizes, and the most that it may
// be. There may be any number of entries: those beyond the limit, the oldest of each batch, empty
// files and entries that are not plain files are deleted at once.
func (d *Dir) unneeded() (files []kept, sum, room int64) {
	room, err := d.read(func(entries []os.DirEntry) {
		for _, entry := range entries {
			p := d.named[entry.Name()]
			if p != nil && !p.unpacked || d.reserved[entry.Name()] > 0 {
				continue
			}
			info, err := entry.Info()
			switch {
			case err != nil:
			case p == nil && !info.Mode().IsRegular():
				d.remove(entry.Name())
			case p == nil && inUse(d.root, file(entry.Name())):
			case p == nil && (linked(info) || info.Size() == 0): // a store has it, or nobody has anything
				d.remove(entry.Name())
			default:
				files = append(files, kept{entry.Name(), info.Size(), time.Since(info.ModTime()).Abs()})
			}
		}
		if surplus := len(files) - d.Limits.Files; surplus > 0 {
			oldestFirst(files)
			for _, old := range files[:surplus] {
				d.remove(old.name)
			}
			files = slices.Delete(files, 0, surplus)
		}
	})
	if err != nil {
		slog.Warn("cannot read unfinished downloads", "path", filepath.Join(d.parent, Name), "err", err)
	}
	for _, f := range files {
		sum += f.size
	}
	return files, sum, room
}

// read calls show with the entries of the directory, some at a time, and returns how many bytes of
// files may be kept.
func (d *Dir) read(show func([]os.DirEntry)) (room int64, err error) {
	root, err := d.opened()
	var dir *os.File
	if err == nil {
		dir, err = root.Open(Name)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &st); err != nil {
		return 0, os.NewSyscallError("fstatfs", err)
	}
	room = d.share(&st)
	for {
		entries, err := dir.ReadDir(batch)
		show(entries)
		if errors.Is(err, io.EOF) {
			return room, nil
		}
		if err != nil {
			return room, err
		}
	}
}

// share returns how many bytes of files may be kept on a disk.
func (d *Dir) share(disk *unix.Statfs_t) int64 {
	return int64(min(disk.Bavail*uint64(disk.Bsize), math.MaxInt64)) / d.Limits.Share
}

// linked reports whether a file has a second name.
func linked(info os.FileInfo) bool {
	st, known := info.Sys().(*syscall.Stat_t)
	return known && st.Nlink > 1
}

// inUse reports whether another process has a file locked.
func inUse(root *os.Root, path string) bool {
	f, err := root.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	if err := flock.Try(f); err != nil {
		_ = f.Close()
		return errors.Is(err, flock.ErrBusy)
	}
	_ = flock.Release(f)
	return false
}

// Close ends the sweeps. Files that are kept stay.
func (d *Dir) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	if d.timer != nil {
		d.timer.Stop()
	}
	if d.root == nil {
		return nil
	}
	return d.root.Close()
}

// Delete deletes the directory, for a wipe.
func (d *Dir) Delete() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	root, err := d.opened()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return root.RemoveAll(Name)
}

// DeleteElsewhere deletes directories of this name in those parents that are not the parent of this
// one: nobody resumes the downloads of an earlier configuration.
func (d *Dir) DeleteElsewhere(parents []string) error {
	here, _ := os.Stat(d.parent)
	var errs []error
	for _, parent := range parents {
		there, err := os.Stat(parent)
		if err != nil || filepath.Clean(parent) == filepath.Clean(d.parent) || here != nil && os.SameFile(here, there) {
			continue
		}
		other := In(parent)
		errs = append(errs, other.Delete(), other.Close())
	}
	return errors.Join(errs...)
}
