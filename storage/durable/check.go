package durable

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.podman.io/image/v5/docker/reference"
	cstorage "go.podman.io/storage"
)

// check is a check of the store after a reboot. The power may have failed: files that were not on
// the disk by then may be incomplete. Of layers in the last manifest it checks only that they
// exist; of other layers it reads every file and compares the digest. It deletes damaged images:
// the kubelet sees that they are gone, and pulls them again.
type check struct {
	manifest *Manifest
	store    cstorage.Store
	listed   map[string]time.Time // layers that are known to be on the disk

	layers  map[string]*cstorage.Layer
	damaged map[string]error // layers by id
	read    int              // layers of which every file was read
	whole   []layerID        // those of them that are not damaged
	aside   []string         // record files that were moved aside; see DamagedRecords
}

// errDamaged says that the content of the disk is wrong. It condemns an image, as fs.ErrNotExist
// does. Other errors (no descriptor, no memory, a disk that answers again later) say nothing about
// the image.
var errDamaged = errors.New("damaged")

func damage(format string, args ...any) error {
	return fmt.Errorf("%w: %w", errDamaged, fmt.Errorf(format, args...))
}

func certain(err error) bool {
	return errors.Is(err, errDamaged) || errors.Is(err, fs.ErrNotExist)
}

// Check is the post-crash check: it repairs the store after a reboot. In the same boot it does
// nothing: what was written is still in memory, and containers run on what it would delete. It
// comes after Restore. Most errors are only logged, and leave the rest of the store usable; it
// returns an error if it cannot even read the records.
func (s *Manifest) Check(ctx context.Context, store cstorage.Store) (err error) {
	s.unsure, err = s.check(ctx, store)
	return err
}

// check returns the layers that stay although they may be damaged: no manifest may list them.
func (s *Manifest) check(ctx context.Context, store cstorage.Store) (unsure []layerID, err error) {
	last := s.last
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	if last == nil || last.Boot == boot && !last.lost && !last.moved {
		return last.unsure(), nil // no manifest yet, or of this boot, see above
	}
	layers, err := store.Layers()
	if err != nil {
		return nil, fmt.Errorf("read layer records: %w", err)
	}
	if last.lost || last.moved && last.Boot == boot { // the manifest does not list them, and containers may be using them
		unsure, known := last.unsure(), last.layers()
		for i := range layers {
			if !covers(known, &layers[i]) {
				unsure = append(unsure, layerID{ID: layers[i].ID, Created: layers[i].Created})
			}
		}
		return unsure, nil
	}
	return s.checkLayers(ctx, store, layers)
}

func (s *Manifest) checkLayers(ctx context.Context, store cstorage.Store, layers []cstorage.Layer) (unsure []layerID, err error) {
	started := time.Now()
	v := &check{
		manifest: s, store: store, listed: s.last.layers(), whole: slices.Clone(s.last.Whole),
		layers: map[string]*cstorage.Layer{}, damaged: map[string]error{},
	}
	if v.aside, err = RootsOf(store).DamagedRecords(); err != nil {
		return nil, fmt.Errorf("look for damaged records: %w", err)
	}
	for i := range layers {
		if v.layers[layers[i].ID] == nil { // else it is in a read-only store as well
			v.layers[layers[i].ID] = &layers[i]
		}
	}
	images, err := store.Images()
	if err != nil {
		return nil, fmt.Errorf("read image records: %w", err)
	}
	var gone, kept int
	for i := range images {
		if images[i].ReadOnly {
			continue
		}
		err := v.image(ctx, &images[i])
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		switch {
		case err == nil:
		case !certain(err):
			kept++
			slog.Warn("cannot verify image after the boot, keeping it: the next boot retries",
				"image", images[i].ID, "names", images[i].Names, "err", err)
		case !FromRegistry(&images[i]):
			kept++
			slog.Error("image damaged when the machine went down, kept because it was built on this node and cannot be pulled: "+
				"rebuild or remove it", "image", images[i].ID, "names", images[i].Names, "err", err)
		default:
			gone++
			v.setAside(&images[i], err)
		}
	}
	v.sweep()
	if err := v.collect(); err != nil {
		slog.Error("cannot remove incomplete layers left by a power cut", "err", err)
	}
	slog.Info("post-crash check of the image store finished", "images", len(images), "layers", len(layers),
		"read", v.read, "damaged", gone, "kept", kept, "took", time.Since(started))
	return v.unsure(), nil
}

// unsure returns the layers that were not found to be whole.
func (s *check) unsure() []layerID {
	var unsure []layerID
	for id, why := range s.damaged {
		if layer := s.layers[id]; why != nil && layer != nil {
			unsure = append(unsure, layerID{ID: id, Created: layer.Created})
		}
	}
	return unsure
}

// FromRegistry reports whether an image can be pulled again. Images that podman or buildah has made
// here have no name, or one of localhost.
func FromRegistry(image *cstorage.Image) bool {
	return slices.ContainsFunc(slices.Concat(image.Names, image.NamesHistory), func(name string) bool {
		named, err := reference.ParseNormalizedNamed(name)
		return err == nil && named.String() == name && reference.Domain(named) != "localhost"
	})
}

// collect deletes files without a record, unless records have been moved aside.
func (s *check) collect() error {
	if len(s.aside) == 0 {
		return s.store.GarbageCollect()
	}
	slog.Warn("image store records were damaged: data without a record is kept, because containers of other tools may need it; "+
		"once these containers are restored or no longer needed, delete the files listed here; the next boot then cleans up", "files", s.aside)
	return nil
}

// image says what is wrong with an image. It checks every layer, so that layers after one that
// cannot be read are not taken for whole.
func (s *check) image(ctx context.Context, image *cstorage.Image) error {
	errs := documents(s.store, image)
	for _, top := range append([]string{image.TopLayer}, image.MappedTopLayers...) {
		for id := range chain(top, s.parentOf) {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := s.layer(ctx, id); err != nil {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// parentOf returns the parent of a layer; empty if it has none, or no record.
func (s *check) parentOf(id string) string {
	if layer := s.layers[id]; layer != nil {
		return layer.Parent
	}
	return ""
}

// documents says what is wrong with the manifests and the config of an image.
func documents(store cstorage.Store, image *cstorage.Image) (errs []error) {
	for _, name := range image.BigDataNames {
		data, err := bigData(store, image.ID, name)
		want := image.BigDataDigests[name]
		if err == nil && want.Validate() == nil && want.Algorithm().Available() && want.Algorithm().FromBytes(data) != want {
			err = damage("its %d bytes do not match the digest %s", len(data), want)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	return errs
}

// bigData reads a manifest or the config of an image.
func bigData(store cstorage.Store, image, name string) ([]byte, error) {
	data, err := store.ImageBigData(image, name)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return data, err
	}
	// The library returns this for whatever kept it from reading.
	file := name
	if !plainName.MatchString(name) {
		file = "=" + base64.StdEncoding.EncodeToString([]byte(name))
	}
	for _, root := range RootsOf(store).All() {
		data, err = os.ReadFile(filepath.Join(root, "overlay-images", image, file))
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return data, err
}

// plainName matches names of data that the library uses as file names.
var plainName = regexp.MustCompile(`^[.0-9a-z]*$`)

// layer says what is wrong with a layer, and remembers the answer.
func (s *check) layer(ctx context.Context, id string) error {
	if err, known := s.damaged[id]; known {
		return err
	}
	err := s.look(ctx, id)
	if err != nil {
		err = fmt.Errorf("layer %s: %w", id, err)
	}
	s.damaged[id] = err
	return err
}

func (s *check) look(ctx context.Context, id string) error {
	layer := s.layers[id]
	if layer == nil {
		return damage("it has no record")
	}
	if layer.ReadOnly {
		return nil
	}
	dirs, err := LayerDirs(s.store, id)
	if err != nil {
		return err
	}
	depth := 0 // of the chain of lower directories
	for id := range chain(id, s.parentOf) {
		if s.layers[id] != nil {
			depth++
		}
	}
	if depth != len(dirs) {
		return damage("it has %d parent layers, of which %d are on disk", depth-1, len(dirs)-1)
	}
	if err := driverFiles(dirs[0], depth-1); err != nil {
		return err
	}
	if covers(s.listed, layer) || additional(dirs[0]) {
		return nil
	}
	s.read++
	if err := s.content(ctx, layer, dirs[0]); err != nil {
		return err
	}
	s.whole = append(s.whole, layerID{ID: id, Created: layer.Created})
	s.manifest.keep(ctx, s.whole)
	return nil
}

// additional reports whether a layer is in an additional layer store, which is responsible for the
// content and may not be mounted yet.
func additional(dir string) bool {
	_, err := os.Readlink(dir)
	if err == nil {
		_, err = os.Stat(filepath.Join(filepath.Dir(dir), "additionallayer"))
	}
	return err == nil
}

// driverFiles checks the files that the overlay driver has beside the directory with a layer's
// files.
func driverFiles(dir string, below int) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() && !additional(dir) {
		return damage("%s is not a directory", dir)
	}
	link, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "link"))
	if err != nil {
		return err
	}
	if len(link) == 0 {
		return damage("its short name is empty")
	}
	if below == 0 {
		return nil
	}
	// For older versions of the library, and for layers that will be above this one.
	lower, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "lower"))
	if err != nil {
		return err
	}
	if count := strings.Count(string(lower), ":") + 1; count != below || len(lower) == 0 {
		return damage("its file \"lower\" (%[2]d bytes) does not list its %[1]d parent layers", below, len(lower))
	}
	return nil
}

// setAside deletes a damaged image and its own layers. Layers of other images stay, if they are not
// damaged.
func (s *check) setAside(image *cstorage.Image, why error) {
	slog.Warn("image damaged when the machine went down, deleted: it will be pulled again when needed",
		"image", image.ID, "names", image.Names, "err", why)
	if err := s.drop(image.ID); err != nil {
		slog.Error("cannot remove damaged image: remove it by hand, with the containers that other tools have made from it",
			"image", image.ID, "err", err)
	}
}

func (s *check) drop(image string) error {
	// No container runs yet: the reference is from the last boot.
	err := s.store.DeleteContainer(s.manifest.cfg.Reference(image))
	if err != nil && !errors.Is(err, cstorage.ErrNotAContainer) && !errors.Is(err, cstorage.ErrContainerUnknown) {
		return err
	}
	if err := DeleteImage(s.store, image); err != nil && !errors.Is(err, cstorage.ErrImageUnknown) {
		return err
	}
	return nil
}

// sweep deletes the remaining damaged layers, those above them first, so that no pull builds on
// one.
func (s *check) sweep() {
	for id, why := range s.damaged {
		if why == nil || !certain(why) {
			continue
		}
		if err := s.deleteLayer(id, map[string]bool{}); err != nil && !needed(err) && !errors.Is(err, fs.ErrNotExist) {
			slog.Error("cannot remove damaged layer", "layer", id, "damage", why, "err", err)
		}
	}
}

// deleteLayer deletes a layer and those above it, unless they are in begun.
func (s *check) deleteLayer(id string, begun map[string]bool) error {
	var errs []error
	begun[id] = true
	if layer := s.layers[id]; len(s.aside) > 0 && layer != nil && layer.UncompressedDigest == "" {
		return nil // maybe a container's, whose record is lost
	}
	for child, layer := range s.layers {
		if layer.Parent == id && !begun[child] {
			errs = append(errs, s.deleteLayer(child, begun))
		}
	}
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil || needed(err) })
	if err := s.store.DeleteLayer(id); !errors.Is(err, cstorage.ErrLayerUnknown) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// reportAside logs that a damaged file was moved aside.
func reportAside(path string, why error) {
	slog.Error("damaged file in the image store, moved aside", "path", path, "err", why)
}
