package layers

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"go.podman.io/storage/pkg/lockfile"
)

// Note implements Target. The library leaves the sizes of blobs out of the records of staged
// layers, from which containers/image takes them when it finds such a layer.
func (u *Unpacker) Note() error {
	if len(u.unnoted) == 0 {
		return nil
	}
	dir := filepath.Join(cmp.Or(u.store.ImageStore(), u.store.GraphRoot()), "overlay-layers")
	lock, err := lockfile.GetLockFile(filepath.Join(dir, "layers.lock"))
	if err != nil {
		return err
	}
	lock.Lock()
	defer lock.Unlock()
	if err := noteSizes(filepath.Join(dir, "layers.json"), u.unnoted); err != nil {
		return fmt.Errorf("note sizes of blobs in records of layers: %w", err)
	}
	clear(u.unnoted)
	_, err = lock.RecordWrite()
	return err
}

// noteSizes adds the sizes of blobs to the records of layers in a file. At every moment the file
// has the old content, or the new content, which has been synced.
func noteSizes(file string, sizes map[string]int64) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var records []json.RawMessage
	if err := json.Unmarshal(text, &records); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	for i, record := range records {
		var has struct {
			ID   string `json:"id"`
			Size int64  `json:"compressed-size"`
		}
		if err := json.Unmarshal(record, &has); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		if size, is := sizes[has.ID]; is && has.Size == 0 && size > 0 {
			rest, _ := bytes.CutPrefix(record, []byte("{"))
			records[i] = slices.Concat([]byte(`{"compressed-size":`), strconv.AppendInt(nil, size, 10), []byte(","), rest)
		}
	}
	if text, err = json.Marshal(records); err != nil {
		return err
	}
	return replace(file, text)
}

// replace gives a file another content.
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
