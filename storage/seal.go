package storage

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
)

// A seal says what of the store has certainly reached the disk: it is made after
// each pull, and at the first start after a boot, by reading the records of
// containers/storage, syncing the file system and then, durably, writing the
// records that were read once more. So a layer in the seal has its content on the
// disk, whoever has pulled it; and where the power fails while one of those
// records is written, the seal has an older one.
//
// After a reboot all that is not in the seal is looked through; see survey.
// docs/decisions/0009-power-cuts.md has the reasons.
type seal struct {
	Boot    string                     `json:"boot"` // in which it was made
	Records map[string]json.RawMessage `json:"records"`
	Unsure  []sealedLayer              `json:"unsure,omitempty"` // layers of which nothing is promised
	// Whole are layers that a survey has read and that has not come to its end: the
	// next one need not read them again.
	Whole []sealedLayer `json:"whole,omitempty"`

	lost bool // it could not be read, and is of this boot
}

const (
	sealsName   = "crius-seal" // directory in the graph root
	sealName    = "seal.json"
	sealID      = "store"
	settledName = "crius-settled" // file in the run root: the boot in which the store was looked through
	sealVersion = 1
)

// recordFiles are those of containers/storage that live as long as the store.
var recordFiles = []string{
	layersFile,
	"overlay-images/images.json",
	"overlay-containers/containers.json",
}

const layersFile = "overlay-layers/layers.json"

// sealer makes seals, one at a time.
type sealer struct {
	root, runRoot string
	surveyed      func() // see Config
	sync          bool   // else the operator wants no syncing: then nothing is certain
	records       *record.Dir[seal]
	mu            sync.Mutex

	unsure []sealedLayer // that the survey could not vouch for
}

// last is the seal that was made last; nil if there was never one. One that cannot
// be read says nothing of any layer. In a boot in which the store has been looked
// through that does not make it suspect: what was written since is still in memory,
// and containers may run on it.
func (s *sealer) last() (*seal, error) {
	if err := s.records.Make(); err != nil {
		return nil, err
	}
	all, lost, damaged, err := s.records.All()
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
			return &seal{Boot: boot, lost: true}, nil
		}
		return &seal{}, nil
	}
	return all[sealID], nil
}

// begin makes the first seal after a boot; last is the one before. What that says
// is still true in the same boot: a restart need not wait for the disk.
func (s *sealer) begin(ctx context.Context, last *seal) error {
	boot, err := bootID()
	if err == nil {
		err = os.WriteFile(s.settledFile(), []byte(boot), 0o600)
	}
	if err != nil {
		slog.WarnContext(ctx, "cannot back up the store manifest: if it is damaged, the next start re-verifies all images", "err", err)
	}
	if boot != "" && last != nil && last.Boot == boot && !last.lost && s.sync == (len(last.Records) > 0) {
		return nil
	}
	if s.sync {
		return s.seal(ctx)
	}
	return s.write(ctx, nil)
}

func (s *sealer) settledFile() string { return filepath.Join(s.runRoot, settledName) }

// keep adds layers that a survey has found whole to the seal of the boot before.
// That is for a survey that is cut short: nothing depends on it.
func (s *sealer) keep(ctx context.Context, last *seal, whole []sealedLayer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	more := *last
	more.Whole = whole
	err := syncFilesystem(s.root)
	if err == nil {
		err = s.put(ctx, &more)
	}
	if err != nil {
		slog.WarnContext(ctx, "cannot record the progress of the post-crash check", "err", err)
	}
}

// seal makes a seal of what the store has now. It takes as long as syncing the
// file system does.
func (s *sealer) seal(ctx context.Context) error {
	if !s.sync {
		return nil
	}
	return s.write(ctx, recordFiles)
}

func (s *sealer) write(ctx context.Context, files []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	boot, err := bootID()
	if err != nil {
		return fmt.Errorf("seal the image store: %w", err)
	}
	now := seal{Boot: boot, Records: map[string]json.RawMessage{}, Unsure: s.unsure}
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(s.root, file))
		if err == nil && json.Valid(text) {
			now.Records[file] = text
		} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("seal the image store: %w", err)
		}
	}
	if s.sync {
		if err := syncFilesystem(s.root); err != nil {
			return fmt.Errorf("seal the image store: %w", err)
		}
	}
	err = s.put(ctx, &now)
	if diskFull(err) {
		err = fmt.Errorf("%w: %w", fault.Exhausted, err)
	}
	if err != nil {
		return fmt.Errorf("seal the image store: %w", err)
	}
	return nil
}

// put returns when the seal is on the disk.
func (s *sealer) put(ctx context.Context, to *seal) error {
	if err := s.records.Make(); err != nil {
		return err
	}
	if err := s.records.Put(ctx, sealID, to); err != nil {
		return err
	}
	return s.records.Sync()
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

// sealedLayer tells a layer from another of the same id: the id follows from the
// content, and a layer may have been deleted and pulled again.
type sealedLayer struct {
	ID      string    `json:"id"`
	Created time.Time `json:"created"`
}

func (s *seal) unsure() []sealedLayer {
	if s == nil {
		return nil
	}
	return s.Unsure
}

// layers are those that are known to be on the disk.
func (s *seal) layers() map[string]time.Time {
	if s == nil {
		return nil
	}
	var list []struct {
		sealedLayer
		Flags map[string]any `json:"flags"`
	}
	known := map[string]time.Time{}
	if json.Unmarshal(s.Records[layersFile], &list) != nil {
		list = nil // it was valid JSON, but no list
	}
	for _, l := range list {
		unsure := slices.ContainsFunc(s.Unsure, func(u sealedLayer) bool { return u.ID == l.ID && u.Created.Equal(l.Created) })
		if l.Flags["incomplete"] == nil && !unsure {
			known[l.ID] = l.Created
		}
	}
	for _, l := range s.Whole {
		known[l.ID] = l.Created
	}
	return known
}

// covers tells whether the content of a layer was on the disk when the seal was
// made.
func covers(known map[string]time.Time, layer *cstorage.Layer) bool {
	created, ok := known[layer.ID]
	return ok && created.Equal(layer.Created)
}

// restored is the content that a damaged record file gets.
func (s *seal) restored(file string) []byte {
	if s != nil && bytes.HasPrefix(bytes.TrimSpace(s.Records[file]), []byte("[")) {
		return s.Records[file]
	}
	return []byte("[]")
}
