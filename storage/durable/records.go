package durable

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
)

// checkRecords looks at the record files of containers/storage before the library
// does. The library refuses a file that is cut off, takes an empty layers.json
// for a store without layers, and never deletes a layer that is its own ancestor.
// Either way the node would have no images until a person came (cri-o#5015). So a damaged file is moved aside, and the file of the
// last manifest takes its place; without a manifest the list is empty, and its
// images are pulled again.
//
// The volatile files are never synced, so a power cut often damages them. They
// describe only what cannot outlive a boot, and are just moved aside.
func (r Roots) checkRecords(last *manifest) error {
	for _, file := range r.records() {
		err := setDamagedAside(file.path, func() error {
			return writeSynced(file.path, last.restored(file.name))
		})
		if err != nil {
			return err
		}
	}
	for _, file := range volatileFiles() {
		path := filepath.Join(r.Graph, file)
		if err := setDamagedAside(path, func() error { return os.Remove(path) }); err != nil {
			return err
		}
	}
	return nil
}

// volatileFiles are the record files that are valid until a reboot.
func volatileFiles() []string {
	return []string{"overlay-layers/volatile-layers.json", "overlay-containers/volatile-containers.json"}
}

// DamagedSuffix is appended to the name of a record file that was moved aside.
const DamagedSuffix = ".damaged"

// DamagedRecords returns the record files that were moved aside. While there is one, a
// layer without a record may belong to a container or an image of that file, and
// exist nowhere else: nothing without a record is deleted until a person has deleted
// the file.
func (r Roots) DamagedRecords() ([]string, error) {
	var found []string
	for _, file := range r.records() { // the volatile ones describe nothing that still exists
		path := file.path + DamagedSuffix
		if _, err := os.Lstat(path); err == nil {
			found = append(found, path)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return found, nil
}

// RecordsIntact returns fault.Precondition if checkRecords would move a file aside.
func (r Roots) RecordsIntact() error {
	for _, file := range r.records() {
		wrong, err := checkRecord(file.path)
		if wrong != nil {
			err = fmt.Errorf("%s is damaged: %w; the next start of the server moves it aside: %w", file.path, wrong, fault.Precondition)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// setDamagedAside gives a damaged record file a second name, with DamagedSuffix,
// and has it replaced. The file exists at every moment: the library would take a
// missing one for an empty store.
func setDamagedAside(path string, replace func() error) error {
	wrong, err := checkRecord(path)
	if wrong == nil || err != nil {
		return err
	}
	aside := path + DamagedSuffix
	if err := os.Remove(aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Link(path, aside); err != nil {
		return err
	}
	reportAside(aside, wrong)
	return replace()
}

// writeSynced replaces a file, whose new content is synced first.
func writeSynced(path string, content []byte) error {
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// checkRecord says what is wrong with a file. A missing file and a JSON list are
// right, unless the list has a layer below itself.
func checkRecord(path string) (wrong, err error) {
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if len(content) == 0 {
		return errors.New("it is empty"), nil
	}
	var list []json.RawMessage
	if err := json.Unmarshal(content, &list); err != nil {
		return fmt.Errorf("it is not valid: %w", err), nil
	}
	return looped(content), nil
}

// looped returns an error if a list of layers has one that is its own ancestor. Lists of anything
// else name no parents.
func looped(list []byte) error {
	var layers []struct{ ID, Parent string }
	_ = json.Unmarshal(list, &layers) // the library says what else is wrong
	parents, walks := map[string]string{}, map[string]int{}
	for _, layer := range layers {
		parents[layer.ID] = layer.Parent
	}
	for i, layer := range layers {
		id := layer.ID
		for ; id != "" && walks[id] == 0; id = parents[id] {
			walks[id] = i + 1
		}
		if id != "" && walks[id] == i+1 {
			return fmt.Errorf("layer %s is its own ancestor", id)
		}
	}
	return nil
}

// RecordedLayers reads the library's files of layers. The library replaces them as a whole, so
// they can be read whoever has them locked.
func (r Roots) RecordedLayers() (all []cstorage.Layer, err error) {
	for _, root := range r.All() {
		text, err := os.ReadFile(filepath.Join(root, layersFile))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var layers []cstorage.Layer
		if err == nil {
			err = json.Unmarshal(text, &layers)
		}
		if err != nil {
			return nil, err
		}
		all = append(all, layers...)
	}
	return all, nil
}

// ImageFiles returns the files in which a store and the read-only ones beside it list their images; none if
// these stores are not known. The library replaces such a file with each change.
func ImageFiles(store cstorage.Store) (files []string) {
	driver, err := store.GraphDriver()
	if err != nil {
		return nil
	}
	for _, root := range slices.Concat(RootsOf(store).All(), driver.AdditionalImageStores()) {
		files = append(files, filepath.Join(root, imagesFile))
	}
	return files
}

// LayerDirs returns the directories of a layer and of all layers below it, top first. For a layer
// in an additional layer store it is a link to the directory.
func LayerDirs(store cstorage.Store, layer string) ([]string, error) {
	driver, err := store.GraphDriver()
	if err != nil {
		return nil, err
	}
	metadata, err := driver.Metadata(layer)
	if err != nil {
		return nil, err
	}
	dirs := []string{metadata["UpperDir"]}
	if below := metadata["LowerDir"]; below != "" {
		dirs = append(dirs, strings.Split(below, ":")...)
	}
	return dirs, nil
}
