package layerstore

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/idtools"
	"go.podman.io/storage/pkg/lockfile"

	"github.com/crius-run/crius/storage/unpack/layers"
)

// recordsDir is the library's directory for the records of layers, in a root of a store.
const recordsDir = "overlay-layers"

// incomplete is the library's flag of a layer that is being added or deleted.
const incomplete = "incomplete"

// records are those of a store's layers, locked.
type records struct {
	locks      []*lockfile.LockFile // in the library's order
	file       string
	text       []byte                        // of the file, without the last bracket
	maps       map[string][2][]idtools.IDMap // of users and groups, by layer
	incomplete bool                          // a layer, which the library will delete
}

// root is the root of a store in which images are.
func root(store cstorage.Store) string { return cmp.Or(store.ImageStore(), store.GraphRoot()) }

// lockRecords locks the records of a store, to which a layer above parent will be added. Layers that are elsewhere, in
// other stores, are taken for its own: they are not added again, since the driver would remove their files. The error
// is cstorage.ErrParentUnknown if there is no such parent.
func lockRecords(store cstorage.Store, parent string, elsewhere []*cstorage.Layer) (*records, error) {
	for attempt := 1; ; attempt++ {
		r, err := openRecords(store)
		if err != nil {
			return nil, fmt.Errorf("records of layers: %w", err)
		}
		for _, l := range elsewhere {
			if !r.has(l.ID) {
				r.maps[l.ID] = [2][]idtools.IDMap{l.UIDMap, l.GIDMap}
			}
		}
		if !r.incomplete && (parent == "" || r.has(parent)) {
			return r, nil
		}
		if r.incomplete { // perhaps the library could not delete it, and would look only if somebody wrote
			err = r.outdate()
		}
		r.unlock()
		if err != nil {
			return nil, err
		}
		_, err = store.Layer(parent) // the library deletes incomplete layers when it looks
		switch {
		case r.incomplete && attempt == 3:
			return nil, fmt.Errorf("%s names a layer that is incomplete and could not be deleted: make room on its file system, or see the log for what keeps it", r.file)
		case parent != "" && err != nil:
			return nil, fmt.Errorf("layer %s: %w: %w", parent, err, cstorage.ErrParentUnknown)
		case attempt == 3:
			return nil, fmt.Errorf("layer %s: %w", parent, cstorage.ErrParentUnknown)
		}
	}
}

// openRecords locks the records and reads them. With an image store, layers are in two places, each with a lock. The
// library takes both, and by the first one alone it notices that others have written records.
func openRecords(store cstorage.Store) (r *records, err error) {
	roots := []string{store.GraphRoot()}
	if store.ImageStore() != "" {
		roots = append(roots, store.ImageStore())
	}
	r = &records{file: filepath.Join(root(store), recordsDir, "layers.json"), maps: map[string][2][]idtools.IDMap{}}
	for _, dir := range roots {
		lock, err := lockfile.GetLockFile(filepath.Join(dir, recordsDir, "layers.lock"))
		if err != nil {
			return nil, err
		}
		r.locks = append(r.locks, lock)
	}
	for _, lock := range r.locks {
		lock.Lock()
	}
	if store.ImageStore() != "" {
		_, err = r.read(filepath.Join(store.GraphRoot(), recordsDir, "layers.json"))
	}
	if err == nil {
		r.text, err = r.read(r.file)
	}
	if err != nil {
		r.unlock()
		return nil, err
	}
	return r, nil
}

// read notes the layers of a file. It returns its text, without the last bracket.
func (r *records) read(file string) (text []byte, err error) {
	text, err = os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(text) == 0 {
		return []byte("["), nil
	}
	var layers []struct {
		ID     string          `json:"id"`
		UIDMap []idtools.IDMap `json:"uidmap"`
		GIDMap []idtools.IDMap `json:"gidmap"`
		Flags  map[string]any  `json:"flags"`
	}
	if err == nil {
		err = json.Unmarshal(text, &layers)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if len(layers) == 0 {
		return []byte("["), nil
	}
	for _, l := range layers {
		r.maps[l.ID] = [2][]idtools.IDMap{l.UIDMap, l.GIDMap}
		r.incomplete = r.incomplete || l.Flags[incomplete] == true
	}
	text, _ = bytes.CutSuffix(bytes.TrimSpace(text), []byte("]"))
	return text, nil
}

// missing returns the indices of the layers to add, all below end. The error is why the layer at end cannot be
// added: it was in the store when it would have been unpacked, but another program has removed it since.
func (r *records) missing(all []layers.Unpacked) (missing []int, end int, err error) {
	for i, l := range all {
		switch {
		case r.has(l.ID):
		case l.Dir != "":
			missing = append(missing, i)
		default:
			return missing, i, fmt.Errorf("layer %s was removed during the pull: %w", l.ID, cstorage.ErrLayerUnknown)
		}
	}
	return missing, len(all), nil
}

func (r *records) has(id string) bool {
	_, has := r.maps[id]
	return has
}

// write writes the records that were read, and those of more layers.
func (r *records) write(more []*cstorage.Layer) error {
	added, err := json.Marshal(more)
	if err != nil {
		return err
	}
	if len(r.text) > 1 {
		added[0] = ','
	} else {
		added = added[1:]
	}
	if err := r.outdate(); err != nil { // first
		return err
	}
	if err := replace(r.file, bytes.Join([][]byte{r.text, added}, nil)); err != nil {
		return fmt.Errorf("records of layers: %w", err)
	}
	return nil
}

// outdate has all that have read the records read them again.
func (r *records) outdate() error {
	for _, lock := range r.locks {
		if _, err := lock.RecordWrite(); err != nil {
			return fmt.Errorf("records of layers: %w", err)
		}
	}
	return nil
}

func (r *records) unlock() {
	for _, lock := range r.locks {
		lock.Unlock()
	}
}

// replace gives a file another content. At every moment the file has the old content, or the new
// content, which has been synced.
func replace(file string, text []byte) error {
	// The library gives such names to files that it is writing, so the next start finds leftovers.
	to, err := os.CreateTemp(filepath.Dir(file), ".tmp-"+filepath.Base(file))
	if err != nil {
		return err
	}
	_, err = to.Write(text)
	if err == nil {
		err = to.Sync()
	}
	if err = errors.Join(err, to.Close()); err == nil {
		err = os.Rename(to.Name(), file)
	}
	if err != nil {
		return errors.Join(err, os.Remove(to.Name()))
	}
	return nil
}
