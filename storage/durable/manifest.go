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

// Config describes a store.
type Config struct {
	Roots
	// Sync is false if the operator wants no syncing: then the manifest lists nothing.
	Sync bool
	// Progress is called during Check, whenever a part of a layer has been read, which may take
	// long. It may be nil.
	Progress func()
	// Reference returns the id of the container record that protects an image from removal.
	Reference func(image string) string
}

// Manifest says which parts of the store have certainly reached the disk. It is written after each
// pull and at the first start after a boot: Write reads the records of containers/storage, syncs
// the file system and then writes, durably, the records that it has read. So the content of a layer
// in the manifest is on the disk, whoever has pulled it; and if the power fails while one of those
// records is written, the manifest has an older one.
//
// After a reboot everything that is not in the manifest is checked; see Check. Only one manifest is
// written at a time.
type Manifest struct {
	cfg    Config
	stored *record.Dir[manifest]
	last   *manifest // read by Restore

	mu     sync.Mutex
	unsure []layerID // layers that the check has not found to be whole
}

// manifest is the document on the disk.
type manifest struct {
	Boot    string                     `json:"boot"` // in which it was written
	Records map[string]json.RawMessage `json:"records"`
	Images  string                     `json:"imagestore,omitempty"` // with some of the images
	Unsure  []layerID                  `json:"unsure,omitempty"`     // layers about which it promises nothing
	// Whole are layers that an interrupted check has read and found to be whole: the next check
	// need not read them again.
	Whole []layerID `json:"whole,omitempty"`

	lost  bool // it cannot be read, and was written in this boot
	moved bool // it is of another imagestore, or from before there was one
}

const (
	manifestDir     = "crius-seal" // directory in the graph root
	manifestName    = "seal.json"
	manifestID      = "store"
	settledName     = "crius-settled" // file in the run root: the boot in which the store was checked
	manifestVersion = 1
)

// NewManifest returns the manifest of a store. It reads and writes nothing yet.
func NewManifest(cfg Config) *Manifest {
	return &Manifest{cfg: cfg, stored: record.At[manifest](filepath.Join(cfg.Graph, manifestDir), manifestName, manifestVersion)}
}

// Restore reads the last manifest, and replaces damaged record files of containers/storage by those
// of the manifest; it moves the damaged ones aside. It comes before the library is opened. It also
// removes the lists of file owners (package idlists) that older versions of crius and other tools
// have left in these files, before any of them is in memory.
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
	if err := errors.Join(errs...); err != nil { // such as a full disk
		slog.Warn("cannot shrink the records of the image store; the next start retries", "err", err)
	}
}

// Mounted returns fault.Precondition if the imagestore has been used before and now lacks the file
// mark: then it is the empty directory on which its file system is still to be mounted. It changes
// nothing.
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

// lastImages returns the imagestore of the last manifest. Restore reports what is wrong with that.
func (s *Manifest) lastImages() string {
	text, err := idlists.Read(s.file()) // Restore has not removed any yet
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

// read returns the last manifest, or nil if there never was one. A manifest that cannot be read
// lists no layer. If the store has already been checked in this boot, its layers are trusted
// nevertheless: what was written since is still in the page cache, and containers may be using it.
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
	if len(lost) > 0 { // now or earlier, and no new one has been written since
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

// Begin writes the first manifest after a boot. In the same boot the last one is still valid, so a
// restart need not wait for the disk.
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

// keep adds layers that a check has found to be whole to the last manifest, for the case that the
// check is interrupted. Nothing else depends on it.
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

// Write writes a manifest of the present store. It takes as long as syncing the file system. On a
// full disk the error is fault.Exhausted.
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
		if strings.HasSuffix(file.name, layersFile) {
			if loop := looped(text); loop != nil { // the last manifest has better ones
				return fmt.Errorf("write the store manifest: %s is damaged: %w", file.path, loop)
			}
		}
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

// put writes a manifest, and returns when it is on the disk.
func (s *Manifest) put(ctx context.Context, to *manifest) error {
	if err := s.stored.Make(); err != nil {
		return err
	}
	if err := s.stored.Put(ctx, manifestID, to); err != nil {
		return err
	}
	return s.stored.Sync()
}

// sync returns when everything in the store is on the disks.
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

// layerID identifies a layer. The id of a layer follows from its content, so a layer that was
// deleted and pulled again has the same id, but another time.
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

// layers returns the layers that are known to be on the disk.
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
			continue // there is none, or it is valid JSON but not a list
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

// covers reports whether the content of a layer was on the disk when the manifest was written.
func covers(known map[string]time.Time, layer *cstorage.Layer) bool {
	created, ok := known[layer.ID]
	return ok && created.Equal(layer.Created)
}

// restored returns the content that replaces a damaged record file.
func (s *manifest) restored(file string) []byte {
	if s != nil && bytes.HasPrefix(bytes.TrimSpace(s.Records[file]), []byte("[")) && looped(s.Records[file]) == nil {
		return s.Records[file]
	}
	return []byte("[]")
}
