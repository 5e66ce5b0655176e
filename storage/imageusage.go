package storage

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/tree"
	"github.com/crius-run/crius/storage/artifact"
	"github.com/crius-run/crius/storage/diskusage"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/registry/download"
)

// imageUsage is what images take of the disk: the layers, whose usage is noted at each, and all else that
// is beside them, which is measured again and again and has few files. Artifacts know their own.
type imageUsage struct {
	roots     durable.Roots
	temporary string // with downloads, if they are not in the roots
	readOnly  bool   // nothing is noted
	stop      func() bool

	first sync.Once

	mu     sync.Mutex
	layers map[string]layerUsage // by directory
	beside diskusage.Usage
	news   int // layers that have been measured
	summed summedLayers
}

// layerUsage is the usage of one layer.
type layerUsage struct {
	diskusage.Usage
	certain bool // measured when the layer was complete; else it is a container's, or an estimate
}

// summedLayers is a sum over all layers, as long as the directories that list them have these stamps.
type summedLayers struct {
	diskusage.Usage
	stamps    []stamp // nil: the sum is not valid
	uncertain []string
}

// sum returns what all of it takes, layers as they are now. It reads the directory with all layers only if
// that has changed.
func (u *imageUsage) sum() (diskusage.Usage, error) {
	u.first.Do(u.prepare)
	lists := u.layerLists()
	u.mu.Lock()
	known, beside := u.summed, u.beside
	u.mu.Unlock()
	if unchanged(lists, known.stamps) && !slices.ContainsFunc(known.uncertain, func(dir string) bool { return u.layer(dir).certain }) {
		return known.Plus(beside), nil
	}
	stamps, _ := stampsOf(lists)
	dirs, err := u.layerDirs()
	if err != nil {
		return diskusage.Usage{}, err
	}
	layers := make(map[string]layerUsage, len(dirs))
	for _, dir := range dirs {
		layers[dir] = u.layer(dir)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	all := summedLayers{stamps: stamps}
	for dir, l := range layers {
		if now := u.layers[dir]; now.certain { // it has been measured meanwhile
			l, layers[dir] = now, now
		}
		if !l.certain {
			all.uncertain = append(all.uncertain, dir)
		}
		all.Usage = all.Plus(l.Usage)
	}
	u.layers, u.summed = layers, all // without those that have been removed
	return all.Plus(u.beside), nil
}

// layer returns what is known of a layer.
func (u *imageUsage) layer(dir string) layerUsage {
	u.mu.Lock()
	known := u.layers[dir]
	u.mu.Unlock()
	if !known.certain {
		if noted, ok := diskusage.Noted(dir); ok {
			return layerUsage{noted, true}
		}
	}
	return known
}

// measured returns how many layers have been measured, ever.
func (u *imageUsage) measured() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.news
}

// ofImage returns the bytes of an image whose layers have their files in these directories. ok is false
// while one of the layers has not been measured.
func (u *imageUsage) ofImage(id string, files []string) (bytes uint64, ok bool, err error) {
	var total diskusage.Usage
	for _, dir := range files {
		known := u.layer(filepath.Dir(dir))
		if !known.certain {
			return 0, false, nil
		}
		total = total.Plus(known.Usage)
	}
	var documents []string
	for _, root := range u.roots.All() {
		documents = append(documents, filepath.Join(root, "overlay-images", id))
	}
	usage, err := diskusage.Of(nil, documents...)
	return total.Plus(usage).Bytes, true, err
}

// prepare prepares the first sum: until layers without a note are measured, they count with the bytes of
// their archives.
func (u *imageUsage) prepare() {
	dirs, err := u.layerDirs()
	unmeasured := map[string]bool{}
	for _, dir := range dirs {
		if !u.layer(dir).certain {
			unmeasured[filepath.Base(dir)] = true
		}
	}
	if len(unmeasured) > 0 {
		records, recordsErr := u.roots.RecordedLayers()
		err = errors.Join(err, recordsErr)
		for _, record := range records {
			if unmeasured[record.ID] {
				for _, root := range u.roots.All() {
					u.set(filepath.Join(root, driverName, record.ID), layerUsage{Usage: diskusage.Usage{Bytes: uint64(max(record.UncompressedSize, 0))}})
				}
			}
		}
	}
	if err = errors.Join(err, u.measureBeside()); err != nil {
		slog.Warn("cannot measure all of the image store yet", "err", err)
	}
}

// measure measures layers without a note, and what is beside layers. It is called by one goroutine at
// a time.
func (u *imageUsage) measure() error {
	dirs, err := u.layerDirs()
	if err != nil {
		return err
	}
	var unnoted []string
	for _, dir := range dirs {
		if !u.layer(dir).certain {
			unnoted = append(unnoted, dir)
		}
	}
	if len(unnoted) > 0 {
		err = u.measureLayers(unnoted)
	}
	if errors.Is(err, tree.ErrStopped) {
		return err
	}
	return errors.Join(err, u.measureBeside())
}

// measureLayers measures layers, and notes what those of images take. Those of containers change.
func (u *imageUsage) measureLayers(dirs []string) error {
	records, err := u.roots.RecordedLayers()
	if err != nil {
		return err
	}
	complete := map[string]bool{}
	for _, record := range records {
		complete[record.ID] = record.UncompressedDigest != ""
	}
	var errs []error
	for _, dir := range dirs {
		id := filepath.Base(dir)
		layer, take := diskusage.Layer{Dir: dir, Split: filepath.Join(u.roots.Graph, "overlay-layers", id+diskusage.SplitSuffix)}, diskusage.Layer.Measure
		if complete[id] && !u.readOnly {
			take = diskusage.Layer.Note
		}
		usage, err := take(layer, u.stop)
		switch {
		case errors.Is(err, tree.ErrStopped):
			return err
		case err == nil:
			u.set(dir, layerUsage{usage, complete[id]})
		case !errors.Is(err, fs.ErrNotExist): // it was removed
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (u *imageUsage) set(dir string, usage layerUsage) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.layers == nil {
		u.layers = map[string]layerUsage{}
	}
	u.layers[dir] = usage
	u.summed.stamps = nil
	if usage.certain {
		u.news++
	}
}

// measureBeside measures what is beside layers: records and documents, downloads, and layers that are being
// unpacked.
func (u *imageUsage) measureBeside() error {
	var paths, lists []string
	for _, root := range u.roots.All() {
		lists = append(lists, filepath.Join(root, driverName), filepath.Join(root, driverName, diskusage.LinksName), filepath.Join(root, "overlay-layers"))
		lists = append(lists, artifact.Lists(root)...)
		paths = append(paths, filepath.Join(root, "overlay-images"), filepath.Join(root, download.Name), profilesIn(root))
		paths = append(paths, artifact.Unfinished(root)...)
		for _, name := range namesIn(filepath.Join(root, driverName)) {
			if !isID(name) && name != diskusage.LinksName {
				paths = append(paths, filepath.Join(root, driverName, name))
			}
		}
		for _, name := range namesIn(filepath.Join(root, "overlay-layers")) {
			if !strings.HasSuffix(name, diskusage.SplitSuffix) { // which counts with its layer
				paths = append(paths, filepath.Join(root, "overlay-layers", name))
			}
		}
	}
	if u.temporary != "" && sameDisk(u.temporary, u.roots.ForImages()) {
		paths = append(paths, filepath.Join(u.temporary, download.Name))
	}
	usage, err := diskusage.Of(u.stop, paths...)
	if err != nil {
		return err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.beside = usage.Plus(diskusage.OfEach(lists...))
	return nil
}

// layerDirs returns the directories of all layers, those of containers included.
func (u *imageUsage) layerDirs() (dirs []string, err error) {
	for _, list := range u.layerLists() {
		entries, err := os.ReadDir(list)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, entry := range entries {
			if isID(entry.Name()) {
				dirs = append(dirs, filepath.Join(list, entry.Name()))
			}
		}
	}
	return dirs, nil
}

// layerLists returns the directories of the directories of layers.
func (u *imageUsage) layerLists() (lists []string) {
	for _, root := range u.roots.All() {
		lists = append(lists, filepath.Join(root, driverName))
	}
	return lists
}

// isID reports whether a name is that of a layer.
func isID(name string) bool { return len(name) == 64 && !strings.Contains(name, ".") }

// namesIn returns the names in a directory, as far as they can be read.
func namesIn(dir string) (names []string) {
	entries, _ := os.ReadDir(dir) // what cannot be read is not counted
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// sameDisk reports whether two directories are on one file system.
func sameDisk(a, b string) bool {
	var of, other unix.Stat_t
	return unix.Stat(a, &of) == nil && unix.Stat(b, &other) == nil && of.Dev == other.Dev
}
