package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/overlay"
)

// Defect is something wrong with the store.
type Defect struct {
	Rootfs string // with the defect; empty: the store itself has it
	Object string // the image or layer
	Text   string
	// Remedy is what Mend does; it may be empty.
	Remedy string
	Mend   func(context.Context) error
	// Minor: nothing is lacking; a person should know it, and do what Advice says.
	Minor  bool
	Advice string
}

// Verify checks that live, mounted root file systems have their writable layers, mounts and images.
// It also looks for images that have lost layers, manifests, their config or the record that
// protects them from other tools, and for layers without an image. It reads records, manifests and
// configs and checks that directories exist, but walks no directory tree.
func (s *Store) Verify(ctx context.Context, live []Rootfs) ([]Defect, error) {
	if err := s.locks.Usable(); err != nil {
		return nil, err
	}
	var defects []Defect
	images := map[string]error{}
	var onLayers []Rootfs
	for _, r := range live {
		if err := ctx.Err(); err != nil {
			return defects, err
		}
		defect := func(text string) { defects = append(defects, Defect{Rootfs: r.ID, Object: r.ImageID, Text: text}) }
		upper := filepath.Join(r.Dir, upperName)
		if _, err := os.Lstat(upper); !r.ReadOnly && errors.Is(err, fs.ErrNotExist) {
			defect("its writable layer " + upper + " is gone")
		}
		if is, err := overlay.Mounted(r.Target); err == nil && !is {
			defect("nothing is mounted at " + r.Target)
		}
		lost, known := images[r.ImageID]
		if !known {
			lost = s.artifacts.damage(r.ImageID)
			images[r.ImageID] = lost
		}
		if lost != nil {
			defect("its image is damaged: " + lost.Error())
		}
		if !s.artifacts.mounts(r) {
			onLayers = append(onLayers, r)
		}
	}
	unheld, err := s.holds.unheld(onLayers)
	if err != nil {
		return defects, err
	}
	more, err := s.defects(ctx, images)
	return slices.Concat(defects, unheld, more, s.Profiles.defects()), err
}

// unheld returns the images that containers use and other tools may remove.
func (h *holds) unheld(live []Rootfs) ([]Defect, error) {
	images, err := h.missing(live)
	if err != nil {
		return nil, fmt.Errorf("read container records: %w", err)
	}
	var defects []Defect
	for _, image := range images {
		defects = append(defects, Defect{
			Object: "image " + image, Text: "containers use it, but the record " + holdPrefix + image + " that protects it from removal by other tools is missing",
			Remedy: "recreate the record",
			Mend:   func(ctx context.Context) error { return h.heal(ctx, image) },
		})
	}
	return defects, nil
}

// defects returns the defects of the store itself. known are images that have been checked.
func (s *Store) defects(ctx context.Context, known map[string]error) ([]Defect, error) {
	records, err := s.store.Images()
	if err != nil {
		return nil, fmt.Errorf("read image records: %w", err)
	}
	var defects []Defect
	for _, record := range records {
		lost := known[record.ID]
		if lost == nil {
			lost = durable.ImageDamage(s.store, &record)
		}
		if err := ctx.Err(); err != nil {
			return defects, err
		}
		if d, is := s.damaged(&record, lost); is {
			defects = append(defects, d)
		}
	}
	aside, err := s.roots.DamagedRecords()
	if err != nil {
		return defects, err
	}
	for _, file := range aside {
		defects = append(defects, Defect{Object: "record file " + file, Minor: true,
			Text:   "it was damaged and moved aside, and crius works without it: layers without an image are kept, because containers of other tools may need them",
			Advice: "if no other tool has containers here, rm " + file + " and restart crius, which removes these layers"})
	}
	orphans, err := s.leftovers.Orphans()
	for _, id := range orphans {
		defects = append(defects, Defect{
			Object: "layer " + id, Text: "no image uses it", Remedy: "delete it",
			Mend: func(ctx context.Context) error { return s.leftovers.DeleteOrphan(ctx, id) },
		})
	}
	return defects, err
}

// damaged returns the defect of an image that has lost something.
func (s *Store) damaged(record *cstorage.Image, lost error) (d Defect, is bool) {
	d = Defect{Object: "image " + record.ID}
	unfinished := errors.Is(lost, durable.ErrDocumentsLost) && durable.NeverWhole(record)
	switch {
	case record.ReadOnly, unfinished && s.leftovers.InTheMaking(record):
		return d, false
	case errors.Is(lost, durable.ErrLayersLooped):
		d.Text = lost.Error()
		return d, true
	case !errors.Is(lost, durable.ErrLayersLost) && !errors.Is(lost, durable.ErrDocumentsLost):
		return d, false
	case !durable.FromRegistry(record) && !(unfinished && len(record.Names) == 0):
		d.Text = lost.Error() + "; it was built on this node and cannot be pulled: rebuild or remove it"
		return d, true
	}
	d.Text, d.Remedy = lost.Error(), "remove it, so that it is pulled again"
	d.Mend = func(ctx context.Context) error {
		if now, err := s.store.Image(record.ID); err == nil && durable.ImageDamage(s.store, now) == nil {
			return nil // it has been pulled again
		}
		s.images.forget(record.ID)
		return s.holds.remove(ctx, record.ID)
	}
	return d, true
}
