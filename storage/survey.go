package storage

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/archive"
	"go.podman.io/storage/pkg/lockfile"
	"golang.org/x/sys/unix"
)

// survey looks through a store after a reboot. The power may have failed: what
// was not on the disk by then may be there in part. Layers that the last seal
// knows are only looked at from outside; of others every file is read and
// compared with the digest. What is damaged is deleted, image by image: the
// kubelet sees that it is gone and pulls it again.
type survey struct {
	store  cstorage.Store
	sealed map[string]time.Time // layers known to be on the disk

	layers  map[string]*cstorage.Layer
	damaged map[string]error // layers by id
	read    int              // layers that were read as a whole
	aside   []string         // record files that were set aside; see damagedRecords
}

// settle makes the store right after a reboot. In the same boot it does nothing:
// what was written is still in memory, and containers run on what would be
// deleted. Errors are reported and leave the rest of the store usable: only what
// cannot even be read is returned.
func settle(ctx context.Context, store cstorage.Store, last *seal) error {
	boot, err := bootID()
	if err != nil {
		return err
	}
	if last == nil || last.Boot == boot {
		return nil // nothing was promised yet, or see above
	}
	started := time.Now()
	s := &survey{store: store, sealed: last.layers(), layers: map[string]*cstorage.Layer{}, damaged: map[string]error{}}
	if s.aside, err = damagedRecords(store.GraphRoot()); err != nil {
		return fmt.Errorf("look for damaged records: %w", err)
	}
	layers, err := store.Layers()
	if err != nil {
		return fmt.Errorf("read layer records: %w", err)
	}
	for i := range layers {
		s.layers[layers[i].ID] = &layers[i]
	}
	images, err := store.Images()
	if err != nil {
		return fmt.Errorf("read image records: %w", err)
	}
	var gone int
	for i := range images {
		if images[i].ReadOnly {
			continue
		}
		err := s.image(ctx, &images[i])
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			gone++
			s.setAside(&images[i], err)
		}
	}
	s.sweep()
	if err := errors.Join(s.collect(), dropTemporary(store.GraphRoot())); err != nil {
		slog.Error("parts of layers that a power cut left cannot be removed", "err", err)
	}
	slog.Info("image store looked through after the boot", "images", len(images), "layers", len(layers),
		"read", s.read, "damaged", gone, "took", time.Since(started))
	return nil
}

// collect deletes what has no record, if the records are those that were there.
func (s *survey) collect() error {
	if len(s.aside) == 0 {
		return s.store.GarbageCollect()
	}
	slog.Warn("records of the image store were damaged: what has no record is left, since containers of other tools may need it; "+
		"when those are restored or not wanted, delete the files, and the next boot cleans up", "files", s.aside)
	return nil
}

// image says what is wrong with an image.
func (s *survey) image(ctx context.Context, image *cstorage.Image) error {
	for _, name := range image.BigDataNames {
		data, err := s.store.ImageBigData(image.ID, name)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		want := image.BigDataDigests[name]
		if want.Validate() == nil && want.Algorithm().Available() && want.Algorithm().FromBytes(data) != want {
			return fmt.Errorf("%s has %d bytes and not the digest %s", name, len(data), want)
		}
	}
	for _, top := range append([]string{image.TopLayer}, image.MappedTopLayers...) {
		for id := top; id != ""; id = s.layers[id].Parent {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := s.layer(id); err != nil {
				return err
			}
		}
	}
	return nil
}

// layer says what is wrong with a layer, and remembers it.
func (s *survey) layer(id string) error {
	if err, known := s.damaged[id]; known {
		return err
	}
	err := s.look(id)
	if err != nil {
		err = fmt.Errorf("layer %s: %w", id, err)
	}
	s.damaged[id] = err
	return err
}

func (s *survey) look(id string) error {
	layer := s.layers[id]
	if layer == nil {
		return errors.New("it has no record")
	}
	if layer.ReadOnly {
		return nil
	}
	dirs, err := layerDirs(s.store, id)
	if err != nil {
		return err
	}
	depth := 0 // of the chain that the mount is made of
	for l := layer; l != nil && depth <= len(s.layers); l = s.layers[l.Parent] {
		depth++
	}
	if depth != len(dirs) {
		return fmt.Errorf("it stands on %d layers, of which %d are on the disk", depth-1, len(dirs)-1)
	}
	if err := driverFiles(dirs[0], depth-1); err != nil {
		return err
	}
	if covers(s.sealed, layer) {
		return nil
	}
	s.read++
	return s.content(layer, dirs[0])
}

// driverFiles looks at what the overlay driver has beside the directory with a
// layer's files.
func driverFiles(dir string, below int) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is no directory", dir)
	}
	link, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "link"))
	if err != nil || len(link) == 0 {
		return fmt.Errorf("its short name has %d bytes: %w", len(link), err)
	}
	if below == 0 {
		return nil
	}
	// For older versions of the library, and for the layers that will stand on it.
	lower, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "lower"))
	if count := strings.Count(string(lower), ":") + 1; err != nil || count != below || len(lower) == 0 {
		return fmt.Errorf("it stands on %d layers, of which %d bytes tell: %w", below, len(lower), err)
	}
	return nil
}

// content compares all of a layer with its digest, and what a digest does not
// see, what is not in the files' content, with the archive.
func (s *survey) content(layer *cstorage.Layer, dir string) (err error) {
	if layer.UncompressedDigest.Validate() != nil {
		return nil // nobody knows what is in it
	}
	uncompressed := archive.Uncompressed
	diff, err := s.store.Diff("", layer.ID, &cstorage.DiffOptions{Compression: &uncompressed})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, diff.Close()) }()
	digester := layer.UncompressedDigest.Algorithm().Digester()
	all := io.TeeReader(diff, digester.Hash())
	owners := len(layer.UIDMap) == 0 && len(layer.GIDMap) == 0
	files := map[string]*tar.Header{} // the last of a name counts
	err = readHeaders(all, files)
	if got := digester.Digest(); err == nil && got != layer.UncompressedDigest {
		err = fmt.Errorf("its digest is %s, not %s", got, layer.UncompressedDigest)
	}
	linked := map[string]bool{} // by further names, whose entries say whose they are
	for name, h := range files {
		if err != nil && behindLink(files, name) {
			// The library looks for it at the wrong end of the link.
			slog.Warn("layer cannot be compared with its digest: it has a file behind a symbolic link", "layer", layer.ID, "file", name, "err", err)
			return nil
		}
		if h.Typeflag == tar.TypeLink {
			linked[path.Clean(h.Linkname)] = true
		}
	}
	if err != nil {
		return err
	}
	for name, h := range files {
		if h.Typeflag == tar.TypeXGlobalHeader || behindLink(files, name) {
			continue
		}
		if err := sameFile(dir, name, h); err != nil {
			return err
		}
		if linked[name] || h.Typeflag == tar.TypeLink {
			continue
		}
		if err := sameMode(dir, name, h, owners); err != nil {
			return err
		}
	}
	return nil
}

// readHeaders reads an archive to its end.
func readHeaders(all io.Reader, files map[string]*tar.Header) error {
	for r := tar.NewReader(all); ; {
		h, err := r.Next()
		if err == io.EOF {
			_, err = io.Copy(io.Discard, all) // the padding
			return err
		}
		if err != nil {
			return err
		}
		files[path.Clean(h.Name)] = h
	}
}

// behindLink tells of a file that its layer reaches through a symbolic link.
// Where it is depends on the link, which is looked at by itself.
func behindLink(files map[string]*tar.Header, name string) bool {
	for dir := path.Dir(name); len(dir) > 1; dir = path.Dir(dir) {
		if h := files[dir]; h != nil && h.Typeflag == tar.TypeSymlink {
			return true
		}
	}
	return false
}

// sameFile compares a file with what the archive says of it.
func sameFile(dir, name string, h *tar.Header) error {
	base := path.Base(name)
	file := filepath.Join(dir, path.Dir(name), strings.TrimPrefix(base, archive.WhiteoutPrefix))
	var st unix.Stat_t
	if base == archive.WhiteoutOpaqueDir {
		value := make([]byte, 1)
		file = filepath.Join(dir, path.Dir(name))
		if n, err := unix.Lgetxattr(file, "trusted.overlay.opaque", value); err != nil || n != 1 || value[0] != 'y' {
			return fmt.Errorf("%s should hide what is below it: %w", file, err)
		}
		return nil
	}
	if err := unix.Lstat(file, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: file, Err: err}
	}
	if strings.HasPrefix(base, archive.WhiteoutPrefix) {
		if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
			return fmt.Errorf("%s should hide what is below it", file)
		}
		return nil
	}
	switch target, err := os.Readlink(file); {
	case h.Typeflag == tar.TypeSymlink && (err != nil || target != h.Linkname):
		return fmt.Errorf("%s leads to %q, not to %q: %w", file, target, h.Linkname, err)
	case h.Typeflag == tar.TypeReg && st.Size != h.Size:
		return fmt.Errorf("%s has %d bytes, not %d", file, st.Size, h.Size)
	}
	return nil
}

// sameMode compares owner and mode of what has them from one entry only.
func sameMode(dir, name string, h *tar.Header, owners bool) error {
	if strings.HasPrefix(path.Base(name), archive.WhiteoutPrefix) {
		return nil
	}
	var st unix.Stat_t
	file := filepath.Join(dir, name)
	if err := unix.Lstat(file, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: file, Err: err}
	}
	if owners && (int(st.Uid) != h.Uid || int(st.Gid) != h.Gid) {
		return fmt.Errorf("%s belongs to %d:%d, not to %d:%d", file, st.Uid, st.Gid, h.Uid, h.Gid)
	}
	if want := uint32(h.Mode) & 0o7777; h.Typeflag != tar.TypeSymlink && st.Mode&0o7777 != want {
		return fmt.Errorf("%s has the mode %o, not %o", file, st.Mode&0o7777, want)
	}
	return nil
}

// setAside takes a damaged image out of the store. Only its own layers go: those
// that other images have stay, if they are sound.
func (s *survey) setAside(image *cstorage.Image, why error) {
	slog.Warn("image was damaged when the machine went down, and is set aside: it will be pulled again when it is needed",
		"image", image.ID, "names", image.Names, "err", why)
	if err := s.drop(image.ID); err != nil {
		slog.Error("damaged image cannot be removed: remove it, and the containers that other tools have made of it, by hand",
			"image", image.ID, "err", err)
	}
}

func (s *survey) drop(image string) error {
	// No container runs yet: a hold is of the last boot.
	err := s.store.DeleteContainer(holdID(image))
	if err != nil && !errors.Is(err, cstorage.ErrNotAContainer) && !errors.Is(err, cstorage.ErrContainerUnknown) {
		return err
	}
	if _, err := s.store.DeleteImage(image, true); err != nil && !errors.Is(err, cstorage.ErrImageUnknown) {
		return err
	}
	return nil
}

// sweep deletes the damaged layers that are left, those above them first, so
// that no pull builds on one.
func (s *survey) sweep() {
	for id, why := range s.damaged {
		if why == nil {
			continue
		}
		if err := s.deleteLayer(id); err != nil && !needed(err) && !errors.Is(err, fs.ErrNotExist) {
			slog.Error("damaged layer cannot be removed", "layer", id, "damage", why, "err", err)
		}
	}
}

func (s *survey) deleteLayer(id string) error {
	var errs []error
	if layer := s.layers[id]; len(s.aside) > 0 && layer != nil && layer.UncompressedDigest == "" {
		return nil // of a container, perhaps, whose record is lost
	}
	for child, layer := range s.layers {
		if layer.Parent == id {
			errs = append(errs, s.deleteLayer(child))
		}
	}
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil || needed(err) })
	if err := s.store.DeleteLayer(id); !errors.Is(err, cstorage.ErrLayerUnknown) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// reportAside tells of a file that is no good and was moved away.
func reportAside(path string, why error) {
	slog.Error("file of the image store is damaged and is set aside", "path", path, "err", why)
}

// temporaryPattern is how containers/storage calls a file until it is whole.
const temporaryPattern = ".tmp-*"

// dropTemporary deletes the files that a power cut kept from becoming whole.
// Under the lock nobody else is writing one.
func dropTemporary(root string) error {
	var errs []error
	for dir, lock := range map[string]string{
		"overlay-layers": "layers.lock", "overlay-images": "images.lock", "overlay-containers": "containers.lock",
	} {
		dir = filepath.Join(root, dir)
		errs = append(errs, dropTemporaryIn(dir, filepath.Join(dir, lock)))
	}
	return errors.Join(errs...)
}

func dropTemporaryIn(dir, lock string) error {
	var all []string
	for _, pattern := range []string{filepath.Join(dir, temporaryPattern), filepath.Join(dir, "*", temporaryPattern)} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		all = append(all, found...)
	}
	if len(all) == 0 {
		return nil
	}
	held, err := lockfile.GetLockFile(lock)
	if err != nil {
		return err
	}
	held.Lock()
	defer held.Unlock()
	var errs []error
	for _, path := range all {
		if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
