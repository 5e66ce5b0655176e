package storage

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/crius-run/crius/internal/fault"
)

// checkRecords looks at the record files of containers/storage before the
// library does. The library refuses a file that is cut off, and takes an empty
// layers.json for a store without layers. Either way the node would be without
// images until a person came (cri-o#5015): a damaged file is moved aside, and
// the one of the last seal takes its place. Without a seal the list is empty, and
// what it had listed is pulled again.
//
// The volatile files are never synced, so that a power cut may well spoil
// them, and describe only what cannot outlive a boot. They are just moved aside,
// which is no damage.
func checkRecords(root string, last *seal) (damaged bool, err error) {
	for _, file := range recordFiles {
		aside, err := moveDamaged(filepath.Join(root, file))
		if err == nil && aside {
			damaged = true
			err = writeSynced(filepath.Join(root, file), last.restored(file))
		}
		if err != nil {
			return damaged, err
		}
	}
	for _, file := range []string{
		"overlay-layers/volatile-layers.json",
		"overlay-containers/volatile-containers.json",
	} {
		if _, err := moveDamaged(filepath.Join(root, file)); err != nil {
			return damaged, err
		}
	}
	return damaged, nil
}

// recordsIntact is fault.Precondition if checkRecords would have something to do.
func recordsIntact(root string) error {
	for _, file := range recordFiles {
		path := filepath.Join(root, file)
		wrong, err := checkRecord(path)
		if wrong != nil {
			err = fmt.Errorf("%s is damaged: %w; the next start of the server moves it aside: %w", path, wrong, fault.Precondition)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// moveDamaged moves a record file aside if it is damaged. The one that was moved
// last stays, under the name with .damaged.
func moveDamaged(path string) (aside bool, err error) {
	wrong, err := checkRecord(path)
	if wrong == nil || err != nil {
		return false, err
	}
	if err := os.Rename(path, path+".damaged"); err != nil {
		return false, err
	}
	reportAside(path+".damaged", wrong)
	return true, nil
}

// writeSynced writes a file that replaces nothing.
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
