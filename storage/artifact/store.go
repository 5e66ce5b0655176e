package artifact

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/diskusage"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/registry/trust"
)

// Config says where artifacts are stored and how they are pulled.
type Config struct {
	Dir string // made by the first pull
	// Former is the former directory of the store, which is removed when nobody uses its artifacts;
	// empty: there is none.
	Former string
	// Additional are the directories of read-only stores.
	Additional []string
	RunRoot    string // for temporary files; the next start removes leftovers
	ReadOnly   bool   // for callers that change nothing
	// IsImage reports whether an image has an id: then no artifact may have it.
	IsImage func(id string) (bool, error)

	Pulls       *progress.Counts
	Settings    func() Settings // in force when a pull begins
	Connections int             // of a pull, until SetConnections
	Downloads   *download.Dir   // of images, which are also deleted when the disk is full; nil: there are none
}

// Settings are those of storage.Config.
type Settings struct {
	ProgressTimeout time.Duration
	MinPullRate     int64
	Parallel        int
}

// In returns the directory of the store in an image root. podman and CRI-O keep artifacts in
// "artifacts", in another format.
func In(root string) string { return filepath.Join(root, "crius-artifacts") }

// Unfinished returns the directories in an image root with what is not an artifact yet: downloads, and
// pulls in progress.
func Unfinished(root string) []string {
	return []string{filepath.Join(In(root), download.Name), filepath.Join(In(root), pendingName)}
}

// Lists returns the directories in an image root that have a name for each artifact or its content.
func Lists(root string) []string {
	return []string{In(root), filepath.Join(In(root), artifactsName), filepath.Join(In(root), blobsName)}
}

// Store is the artifacts in a directory, which no other process changes. Its methods are safe for
// concurrent use.
type Store struct {
	cfg        Config
	additional *additional
	downloads  *download.Dir // of files whose artifact is not stored yet
	pulling    locks         // by id and registry

	writing sync.Mutex // held while records change

	mu        sync.Mutex
	artifacts map[string]*Artifact
	users     map[string]map[string]bool // ids of root file systems, by artifact
	reserved  map[string]int             // number of pulls of images, by id
	unusable  map[string]error           // reasons why Open could not use artifacts, by id
	former    *former                    // nil: there is none
}

// Open reads the artifacts, and removes leftovers of unfinished pulls and removals. Artifacts that
// cannot be used are not listed. They stay, since containers may be using them: damaged ones until
// Adopt, others until a version of crius can use them.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	s := &Store{cfg: cfg, downloads: cfg.makeDownloads(), additional: &additional{dirs: cfg.Additional, patience: readPatience}, artifacts: map[string]*Artifact{}, users: map[string]map[string]bool{}, reserved: map[string]int{}, unusable: map[string]error{}}
	dirs, err := os.ReadDir(s.path(artifactsName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read artifacts: %w", err)
	}
	for _, dir := range dirs {
		a, loadErr := load(s.path(artifactsName, dir.Name()))
		if loadErr == nil {
			s.artifacts[a.ID] = a
			continue
		}
		slog.Warn("unusable artifact not listed", "image", dir.Name(), "err", loadErr)
		s.unusable[dir.Name()] = loadErr
	}
	s.former = cfg.findFormer(ctx)
	s.settleOwnNames()
	s.additional.read(ctx)
	if cfg.ReadOnly {
		return s, nil
	}
	left := []error{os.RemoveAll(s.path(pendingName))}
	s.downloads.Sweep()
	left = append(left, s.sweep())
	if len(dirs) > 0 { // for removals, which must work on a full disk
		left = append(left, os.MkdirAll(s.path(pendingName), 0o700))
	}
	if err := errors.Join(left...); err != nil { // such as on a read-only disk, which is no reason not to start
		slog.Warn("cannot remove leftovers of unfinished pulls; the next start retries", "err", err)
	}
	return s, nil
}

// SetConnections replaces Config.Connections.
func (s *Store) SetConnections(most int) { s.downloads.Connections.Store(int64(most)) }

// makeDownloads returns the directory for downloads of files. It is on the disk of the content, so
// that downloads become content without a copy, and one artifact may have a large part of the
// limit.
func (cfg *Config) makeDownloads() *download.Dir {
	d := download.In(cfg.Dir)
	d.Limits.Files, d.Limits.Share = source.MaxFiles, 2
	d.Connections.Store(int64(cfg.Connections))
	if d.Beside = cfg.Downloads; d.Beside != nil {
		d.Beside.Beside = d
	}
	return d
}

// Close ends the sweeps of downloads. It may be called on nil.
func (s *Store) Close() error {
	if s == nil { // it could not be opened
		return nil
	}
	return s.downloads.Close()
}

// SweepDownloads deletes downloads, here and of images, that exceed the limits, which depend on the
// free space.
func (s *Store) SweepDownloads() {
	s.downloads.Sweep()
	if s.cfg.Downloads != nil {
		s.cfg.Downloads.Sweep()
	}
}

// Names within the directory of a store.
const (
	artifactsName = "artifacts"
	blobsName     = "blobs"
	pendingName   = "pending"
)

func (s *Store) path(parts ...string) string {
	return filepath.Join(append([]string{s.cfg.Dir}, parts...)...)
}

func (s *Store) blob(d digest.Digest) string {
	return s.path(blobsName, d.Algorithm().String()+"-"+d.Encoded())
}

// settleOwnNames leaves each name to the artifact that was pulled last, if two have it after a
// crash.
func (s *Store) settleOwnNames() {
	byTime := slices.SortedFunc(maps.Values(s.artifacts), func(a, b *Artifact) int { return b.Pulled.Compare(a.Pulled) })
	taken := map[string]bool{}
	for _, a := range byTime {
		for _, name := range a.Names {
			if taken[name] {
				a.Record = a.without(name)
			}
			taken[name] = true
		}
	}
}

// All returns the artifacts. Those in additional stores lose names that are taken, or that artifacts
// in this store have.
func (s *Store) All(ctx context.Context, taken func(name string) bool) []*Artifact {
	all := s.own()
	own := map[string]bool{}
	for _, a := range all {
		own[a.ID] = true
		for _, name := range a.Names {
			own[name] = true
		}
	}
	for id, a := range s.additional.all(ctx) {
		if own[id] {
			continue
		}
		isTaken := func(name string) bool { return own[name] || taken(name) }
		if slices.ContainsFunc(a.Names, isTaken) {
			less := *a
			less.Names = slices.DeleteFunc(slices.Clone(a.Names), isTaken)
			a = &less
		}
		all = append(all, a)
	}
	return all
}

// own returns the artifacts in this store.
func (s *Store) own() []*Artifact {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.artifacts))
}

// Has reports whether there is an artifact with the id. It may be unusable, or in the former store.
func (s *Store) Has(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.artifacts[id] != nil || s.unusable[id] != nil || s.former.has(id) || s.additional.find(id) != nil
}

// Find returns the artifact with this id, or nil.
func (s *Store) Find(id string) *Artifact { return cmp.Or(s.find(id), s.additional.find(id)) }

// find returns the artifact with this id in this store, or nil.
func (s *Store) find(id string) *Artifact {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.artifacts[id]
}

// crowded refuses an artifact if there are too many, or if it would take too much memory.
func (s *Store) crowded(a *Artifact) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	number, kept := 1, a.kept()
	if known := s.artifacts[a.ID]; known != nil && kept <= known.kept() {
		return nil
	}
	for id, other := range s.artifacts {
		if id != a.ID {
			number, kept = number+1, kept+other.kept()
		}
	}
	if number > maxArtifacts || kept > maxKept {
		return fmt.Errorf("the store has too many OCI artifacts (%d, at most %d) or names of their files (%d bytes, at most %d); remove some: %w",
			number-1, maxArtifacts, kept, maxKept, fault.Exhausted)
	}
	return nil
}

// Usage returns what all artifacts take of the disk, each blob counted once.
func (s *Store) Usage() (sum diskusage.Usage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	counted := map[digest.Digest]bool{}
	for _, a := range s.artifacts {
		sum = sum.Plus(a.usageWithout(counted))
	}
	return sum
}

// Use notes that a root file system uses an artifact, and returns the directory with the artifact's
// files, which stays until Drop. If there is no such artifact, the error is fault.NotFound.
func (s *Store) Use(id, user string) (dir string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := cmp.Or(s.artifacts[id], s.additional.find(id))
	if a == nil {
		return "", fmt.Errorf("artifact %s is not in the store, pull it again: %w", id, fault.NotFound)
	}
	if s.users[id] == nil {
		s.users[id] = map[string]bool{}
	}
	s.users[id][user] = true
	return filepath.Join(a.dir, filesName), nil
}

// Drop ends a use.
func (s *Store) Drop(ctx context.Context, id, user string) {
	s.mu.Lock()
	delete(s.users[id], user)
	s.mu.Unlock()
	s.dropFormer(ctx)
}

// Adopt sets the users of all artifacts: root file systems by artifact. It removes damaged
// artifacts without users, and the former store if it has none.
func (s *Store) Adopt(ctx context.Context, users map[string][]string) {
	s.mu.Lock()
	clear(s.users)
	for id, all := range users {
		s.users[id] = map[string]bool{}
		for _, user := range all {
			s.users[id][user] = true
		}
	}
	if s.former != nil {
		s.former.adopted = true
	}
	s.mu.Unlock()
	s.dropFormer(ctx)
	s.removeDamaged()
}

// Remove removes an artifact. Removing one that does not exist succeeds; if root file systems use
// it, or it is only in an additional store, the error is fault.Precondition.
func (s *Store) Remove(ctx context.Context, id string) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	if s.find(id) == nil {
		return s.refuseAdditional(id)
	}
	a, err := s.take(id)
	if err != nil {
		return err
	}
	err = trace.Call(ctx, "delete artifact", func() error { return s.delete(id) })
	if err != nil {
		s.publish(a)
	}
	return err
}

func (s *Store) removeDamaged() {
	s.writing.Lock() // so that none of them is pulled again meanwhile
	defer s.writing.Unlock()
	s.mu.Lock()
	var unused []string
	for id, why := range s.unusable {
		if errors.Is(why, ErrDamaged) && len(s.users[id]) == 0 {
			unused = append(unused, id)
		}
	}
	s.mu.Unlock()
	for _, id := range unused {
		if err := s.delete(id); err != nil { // such as on a read-only disk, which is no reason not to start
			slog.Warn("cannot remove damaged artifact; the next start retries", "image", id, "err", err)
			continue
		}
		s.mu.Lock()
		delete(s.unusable, id)
		s.mu.Unlock()
	}
}

// take removes an artifact from the list, unless root file systems use it.
func (s *Store) take(id string) (*Artifact, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := InUse(id, s.users[id]); err != nil {
		return nil, err
	}
	a := s.artifacts[id]
	delete(s.artifacts, id)
	delete(s.users, id)
	return a, nil
}

// InUse returns fault.Precondition if there are users, which are ids of root file systems, of the
// image or artifact id. The text names one of their containers.
func InUse(id string, users map[string]bool) error {
	if len(users) == 0 {
		return nil
	}
	containers := map[string]bool{}
	for user := range users {
		container, _, _ := strings.Cut(user, "-") // volumes have a suffix (storage.Rootfs)
		containers[container] = true
	}
	first, others := slices.Min(slices.Collect(maps.Keys(containers))), ""
	if n := len(containers) - 1; n > 0 {
		others = fmt.Sprintf(" and %d more", n)
	}
	return fmt.Errorf("image %s is in use by container %s%s: remove the container first; if that was done, crius is still removing its files: %w", id, first, others, fault.Precondition)
}

func (s *Store) publish(a *Artifact) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.artifacts[a.ID] = a
	delete(s.unusable, a.ID)
}

// delete deletes the files of an artifact. The artifact is gone as soon as it has left its place.
func (s *Store) delete(id string) error {
	if err := os.MkdirAll(s.path(pendingName), 0o700); err != nil { // it usually exists
		return err
	}
	aside := s.path(pendingName, "removed-"+id)
	if err := os.RemoveAll(aside); err != nil { // from an earlier attempt
		return err
	}
	if err := os.Rename(s.path(artifactsName, id), aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := errors.Join(syncFile(s.path(artifactsName)), os.RemoveAll(aside), s.sweep()); err != nil {
		slog.Warn("cannot delete all files of a removed artifact; the next start retries", "image", id, "err", err)
	}
	return nil
}

// sweep deletes blobs that belong to no artifact and no pull.
func (s *Store) sweep() error {
	blobs, err := os.ReadDir(s.path(blobsName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, blob := range blobs {
		var st unix.Stat_t
		path := s.path(blobsName, blob.Name())
		err := unix.Lstat(path, &st)
		if err == nil && st.Nlink == 1 {
			err = unix.Unlink(path)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // another failed pull sweeps as well
			errs = append(errs, &os.PathError{Op: "sweep", Path: path, Err: err})
		}
	}
	return errors.Join(errs...)
}

// Unname removes a name, which now means an image, from the artifact that had it.
func (s *Store) Unname(ctx context.Context, name string) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	return s.unname(ctx, name, "")
}

// unname removes a name from all artifacts except one.
func (s *Store) unname(ctx context.Context, name, except string) error {
	s.mu.Lock()
	var named []*Artifact
	for _, a := range s.artifacts {
		if a.ID != except && slices.Contains(a.Names, name) {
			named = append(named, a)
		}
	}
	s.mu.Unlock()
	var errs []error
	for _, a := range named {
		errs = append(errs, s.change(ctx, a, a.without(name), nil))
	}
	return errors.Join(errs...)
}

// change writes a new record for an artifact, and adds signatures to its own.
func (s *Store) change(ctx context.Context, a *Artifact, record Record, signatures [][]byte) error {
	changed := *a
	changed.Record = record
	dir := s.path(artifactsName, a.ID)
	err := trace.Call(ctx, "write artifact record", func() error {
		stored, err := readRecord(dir)
		if err != nil {
			return err
		}
		err = writeRecord(dir, document{record, trust.Union(signatures, stored.Signatures)})
		return errors.Join(err, syncFile(dir), changed.measure(dir))
	})
	if err != nil {
		return fmt.Errorf("write record of artifact %s: %w", a.ID, err)
	}
	s.publish(&changed)
	return nil
}

// Check says what is wrong with an artifact in use.
func (s *Store) Check(id string) error {
	s.mu.Lock()
	err := s.unusable[id]
	s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("artifact %s is unusable: %w", id, err)
	}
	a := s.Find(id)
	if a == nil {
		return fmt.Errorf("artifact %s is not in the store: %w", id, fault.NotFound)
	}
	if _, err := os.Stat(filepath.Join(a.dir, filesName)); err != nil {
		return fmt.Errorf("artifact %s has no files: %w", id, err)
	}
	return nil
}
