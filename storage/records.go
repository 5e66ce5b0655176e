package storage

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/crius-run/crius/internal/fault"
)

// checkRecords looks at the record files of containers/storage before the
// library does. The library takes an empty layers.json, which a power cut may
// leave, for a store without layers and would overwrite the true one's
// remains: crius refuses such a store instead, and changes nothing.
//
// The volatile files are never synced, so that a power cut may well spoil
// them, and describe only what cannot outlive a boot. They are moved aside.
func checkRecords(root string) error {
	var damaged error
	for _, file := range []string{
		"overlay-layers/layers.json",
		"overlay-images/images.json",
		"overlay-containers/containers.json",
	} {
		path := filepath.Join(root, file)
		if err := checkRecord(path); err != nil {
			damaged = errors.Join(damaged, fmt.Errorf("%s: %w: %w; nothing was changed: "+
				"restore the file, or move %s away to start with an empty store", path, fault.Precondition, err, root))
		}
	}
	if damaged != nil {
		return damaged
	}
	for _, file := range []string{
		"overlay-layers/volatile-layers.json",
		"overlay-containers/volatile-containers.json",
	} {
		path := filepath.Join(root, file)
		err := checkRecord(path)
		if err == nil {
			continue
		}
		slog.Warn("damaged volatile record file of containers/storage moved aside", "path", path, "err", err)
		if err := os.Rename(path, path+".damaged"); err != nil {
			return err
		}
	}
	return nil
}

// checkRecord accepts a missing file and a JSON list.
func checkRecord(path string) error {
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if len(content) == 0 {
		return errors.New("the file is empty")
	}
	var list []json.RawMessage
	if err := json.Unmarshal(content, &list); err != nil {
		return fmt.Errorf("the file is not valid: %w", err)
	}
	return nil
}
