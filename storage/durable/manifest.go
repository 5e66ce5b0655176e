package durable

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/record"
	"github.com/crius-run/crius/storage/idlists"
)

// Config says which store it is.
type Config struct {
	Roots
	// Sync is false where the operator wants no syncing: then nothing is certain.
	Sync bool
	// Progress is called while layers are read after a boot, which may take long,
	// whenever a part of one has been read; nil: not called.
	Progress func()
	// Reference is the id of the container record that keeps an image from removal.
	Reference func(image string) string
}

// Manifest says what of the store has certainly reached the disk: it is written after
// each pull, and at the first start after a boot, by reading the records of
// containers/storage, syncing the file system and then, durably, writing the
// records that were read once more. So a layer in the manifest has its content on the
// disk, whoever has pulled it; and where the power fails while one of those
// records is written, the manifest has an older one.
//
// After a reboot all that is not in the manifest is checked; see Check. Manifests are
// written one at a time.
type Manifest struct {
	cfg    Config
	stored *record.Dir[manifest]
	last   *manifest // as Restore has found it

	mu     sync.Mutex
	unsure []layerID // that the check could not vouch for
}

// manifest is the document.
type manifest struct {
	Boot    string                     `json:"boot"` // in which it was written
	Records map[string]json.RawMessage `json:"records"`
	Images  string                     `json:"imagestore,omitempty"` // of which some are
	Unsure  []layerID                  `json:"unsure,omitempty"`     // layers of which nothing is promised
	// Whole are layers that a check has read and that has not come to its end: the
	// next one need not read them again.
	Whole []layerID `json:"whole,omitempty"`

	lost  bool // it could not be read, and is of this boot
	moved bool // it is of another imagestore, or from before there was one
}

const (
	manifestDir     = "crius-seal" // directory in the graph root
	manifestName    = "seal.json"
	manifestID      = "store"
	settledName     = "crius-settled" // file in the run root: the boot in which the store was checked
	manifestVersion = 1
)

// NewManifest reads and writes nothing yet.
func NewManifest(cfg Config) *Manifest {
	return &Manifest{cfg: cfg, stored: record.At[manifest](filepath.Join(cfg.Graph, manifestDir), manifestName, manifestVersion)}
}

// Restore reads the last manifest and moves record files of containers/storage aside
// that are damaged; the manifest's take their place. It comes before the library is
// opened, and before any of these files is in memory: it takes the owners of files from them
// (package idlists), which older versions of crius have left there, and other tools leave.
func (s *Manifest) Restore() (err error) {
	s.dropOwners()
	if s.last, err = s.read(); err != nil {
		return err
	}
	return s.cfg.Roots.checkRecords(s.last)
}

func (s *Manifest) dropOwners() {
	errs := []error{idlists.Drop(s.file())}
	for _, root := range s.cfg.All() {
		errs = append(errs, idlists.DropFromLayers(root))
	}
	if err := errors.Join(errs...); err != nil { // on a full disk, say
		slog.Warn("cannot shrink the records of the image store; the next start retries", "err", err)
	}
}

// Mounted is fault.Precondition if the imagestore is one that has been used and now lacks
// the file mark: what is there is the empty directory on which its file system has still to
// be mounted. It changes nothing.
func (s *Manifest) Mounted(mark string) error {
	if s.cfg.Images == "" || s.lastImages() != s.cfg.Images {
		return nil
	}
	mark = filepath.Join(s.cfg.Images, mark)
	if _, err := os.Stat(mark); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return fmt.Errorf("%s is missing, so this directory is not the one that was used before: mount its file system, and have the service wait for it "+
		"(RequiresMountsFor=%s in a drop-in of the unit); if what was there is gone for good, create that file: %w", mark, s.cfg.Images, fault.Precondition)
}

// lastImages is the imagestore of the last manifest; what is wrong with that Restore says.
func (s *Manifest) lastImages() string {
	text, err := idlists.Read(s.file()) // as Restore has not dropped any yet
	var last struct {
		Body struct {
			Images string `json:"imagestore"`
		} `json:"body"`
	}
	if err == nil {
		err = json.Unmarshal(text, &last)
	}
	if err != nil {
		return ""
	}
	return last.Body.Images
}

func (s *Manifest) file() string { return filepath.Join(s.stored.Path(manifestID), manifestName) }

// Remove deletes the manifest, for a wipe.
func (s *Manifest) Remove() error {
	return errors.Join(os.RemoveAll(filepath.Join(s.cfg.Graph, manifestDir)), os.RemoveAll(s.settledFile()))
}

// read returns the manifest that was written last, nil if there never was one. A manifest
// that cannot be read vouches for no layer. If the store has already been checked in this
// boot, its layers are trusted all the same: what was written since is still in the page
// cache, and containers may be using it.
func (s *Manifest) read() (*manifest, error) {
	if err := s.stored.Make(); err != nil {
		return nil, err
	}
	all, lost, damaged, err := s.stored.All()
	if err != nil {
		return nil, err
	}
	for _, d := range damaged {
		reportAside(d.File, d.Err)
	}
	if len(lost) > 0 { // now or earlier, and no other one was made
		boot, err := bootID()
		if err != nil {
			return nil, err
		}
		if settled, _ := os.ReadFile(s.settledFile()); string(settled) == boot {
			return &manifest{Boot: boot, lost: true}, nil
		}
		return &manifest{}, nil
	}
	last := all[manifestID]
	if last != nil && s.cfg.Sync && last.Images != s.cfg.Images {
		last.moved, last.Whole = true, nil
		delete(last.Records, apart+layersFile)
		delete(last.Records, apart+imagesFile)
	}
	return last, nil
}

// Begin writes the first manifest after a boot. What the one before says is still true
// in the same boot: a restart need not wait for the disk.
func (s *Manifest) Begin(ctx context.Context) error {
	defer func() { s.last = nil }() // it is as large as the records
	boot, err := bootID()
	if err == nil {
		err = os.WriteFile(s.settledFile(), []byte(boot), 0o600)
	}
	if err != nil {
		slog.WarnContext(ctx, "cannot back up the store manifest: if it is damaged, the next start re-verifies all images", "err", err)
	}
	if last := s.last; boot != "" && last != nil && last.Boot == boot && !last.lost && !last.moved && s.cfg.Sync == (len(last.Records) > 0) {
		return nil
	}
	if s.cfg.Sync {
		return s.Write(ctx)
	}
	return s.write(ctx, nil)
}

func (s *Manifest) settledFile() string { return filepath.Join(s.cfg.Run, settledName) }

// keep adds layers that a check has found whole to the manifest of the boot before.
// That is for a check that is cut short: nothing depends on it.
func (s *Manifest) keep(ctx context.Context, whole []layerID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	more := *s.last
	more.Whole = whole
	err := s.cfg.sync()
	if err == nil {
		err = s.put(ctx, &more)
	}
	if err != nil {
		slog.WarnContext(ctx, "cannot record the progress of the post-crash check", "err", err)
	}
}

// Write writes a manifest of what the store has now. It takes as long as syncing the
// file system does. On a full disk the error is fault.Exhausted.
func (s *Manifest) Write(ctx context.Context) error {
	if !s.cfg.Sync {
		return nil
	}
	return s.write(ctx, s.cfg.records())
}

func (s *Manifest) write(ctx context.Context, files []recordFile) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	boot, err := bootID()
	if err != nil {
		return fmt.Errorf("write the store manifest: %w", err)
	}
	now := manifest{Boot: boot, Records: map[string]json.RawMessage{}, Unsure: s.unsure}
	for _, file := range files {
		text, err := os.ReadFile(file.path)
		if err == nil && json.Valid(text) {
			now.Records[file.name] = text
		} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("write the store manifest: %w", err)
		}
	}
	if s.cfg.Sync {
		now.Images = s.cfg.Images
		if err := s.cfg.sync(); err != nil {
			return fmt.Errorf("write the store manifest: %w", err)
		}
	}
	err = s.put(ctx, &now)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		err = fmt.Errorf("%w: %w", err, fault.Exhausted)
	}
	if err != nil {
		return fmt.Errorf("write the store manifest: %w", err)
	}
	return nil
}

// put returns when the manifest is on the disk.
func (s *Manifest) put(ctx context.Context, to *manifest) error {
	if err := s.stored.Make(); err != nil {
		return err
	}
	if err := s.stored.Put(ctx, manifestID, to); err != nil {
		return err
	}
	return s.stored.Sync()
}

// sync returns when all that is in the store is on the disks.
func (r Roots) sync() error {
	var errs []error
	for _, root := range r.All() {
		errs = append(errs, syncFilesystem(root))
	}
	return errors.Join(errs...)
}

func syncFilesystem(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return &os.PathError{Op: "syncfs", Path: path, Err: err}
	}
	return nil
}

func bootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text)), err
}

// layerID tells a layer from another of the same id: the id follows from the
// content, and a layer may have been deleted and pulled again.
type layerID struct {
	ID      string    `json:"id"`
	Created time.Time `json:"created"`
}

func (s *manifest) unsure() []layerID {
	if s == nil {
		return nil
	}
	return s.Unsure
}

// layers are those that are known to be on the disk.
func (s *manifest) layers() map[string]time.Time {
	if s == nil {
		return nil
	}
	known := map[string]time.Time{}
	for _, file := range []string{layersFile, apart + layersFile} {
		var list []struct {
			layerID
			Flags map[string]any `json:"flags"`
		}
		if json.Unmarshal(s.Records[file], &list) != nil {
			continue // there is none, or it was valid JSON, but no list
		}
		for _, l := range list {
			unsure := slices.ContainsFunc(s.Unsure, func(u layerID) bool { return u.ID == l.ID && u.Created.Equal(l.Created) })
			if l.Flags["incomplete"] == nil && !unsure {
				known[l.ID] = l.Created
			}
		}
	}
	for _, l := range s.Whole {
		known[l.ID] = l.Created
	}
	return known
}

// covers tells whether the content of a layer was on the disk when the manifest was
// written.
func covers(known map[string]time.Time, layer *cstorage.Layer) bool {
	created, ok := known[layer.ID]
	return ok && created.Equal(layer.Created)
}

// restored is the content that a damaged record file gets.
func (s *manifest) restored(file string) []byte {
	if s != nil && bytes.HasPrefix(bytes.TrimSpace(s.Records[file]), []byte("[")) {
		return s.Records[file]
	}
	return []byte("[]")
}
