package durable

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
)

// checkRecords looks at the record files of containers/storage before the
// library does. The library refuses a file that is cut off, and takes an empty
// layers.json for a store without layers. Either way the node would be without
// images until a person came (cri-o#5015): a damaged file is moved aside, and
// the one of the last manifest takes its place. Without one the list is empty, and
// what it had listed is pulled again.
//
// The volatile files are never synced, so that a power cut may well spoil
// them, and describe only what cannot outlive a boot. They are just moved aside.
func checkRecords(roots Roots, last *manifest) error {
	for _, file := range roots.records() {
		err := setDamagedAside(file.path, func() error {
			return writeSynced(file.path, last.restored(file.name))
		})
		if err != nil {
			return err
		}
	}
	for _, file := range volatileFiles() {
		path := filepath.Join(roots.Graph, file)
		if err := setDamagedAside(path, func() error { return os.Remove(path) }); err != nil {
			return err
		}
	}
	return nil
}

// volatileFiles are the record files that end with the boot.
func volatileFiles() []string {
	return []string{"overlay-layers/volatile-layers.json", "overlay-containers/volatile-containers.json"}
}

// DamagedSuffix is appended to the name of a record file that was moved aside.
const DamagedSuffix = ".damaged"

// DamagedRecords are the record files that were set aside. As long as there is
// one, what has no record may be of a container or an image that was in it, and
// that exists nowhere else: nothing is deleted for want of a record until a
// person has deleted the file.
func DamagedRecords(roots Roots) ([]string, error) {
	var found []string
	for _, file := range roots.records() { // what was in the volatile ones ended with the boot
		path := file.path + DamagedSuffix
		if _, err := os.Lstat(path); err == nil {
			found = append(found, path)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return found, nil
}

// RecordsIntact is fault.Precondition if checkRecords would have something to do.
func RecordsIntact(roots Roots) error {
	for _, file := range roots.records() {
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

// setDamagedAside gives a damaged record file a second name, which ends with
// .damaged, and has it replaced. At no moment is there no file: the library would
// take that for an empty store.
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

// writeSynced replaces a file by one that has reached the disk.
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
// fine.
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
	return nil, nil
}

// RecordedLayers reads the library's files of layers, which are replaced as a whole and
// so can be read whoever has them locked.
func RecordedLayers(roots Roots) (all []cstorage.Layer, err error) {
	for _, root := range roots.All() {
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

// LayerDirs are the directories of a layer and of all below it, top first. One of a layer
// that is in an additional layer store is a link to it.
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
