package layers

import (
	"archive/tar"
	"errors"
	"hash/maphash"
	"io"
	"path"

	tarsplit "github.com/vbatts/tar-split/tar/storage"
)

// Replaced returns the name of an entry of a layer's archive in whose place was a file, or a directory
// with one; empty if there is none. The content of that file is no longer there, so such a layer cannot
// be rebuilt.
func Replaced(at Place) (name string, err error) {
	description, err := at.describe()
	if err != nil {
		return "", err
	}
	defer description.Close()
	return replaced(newEntries(description))
}

// Size of a header in an archive, and where it has the type.
const (
	headerSize = 512
	headerType = 156
)

// replaced keeps a hash of each name: a layer may have millions.
func replaced(from tarsplit.Unpacker) (string, error) {
	seed := maphash.MakeSeed()
	files, above := map[uint64]bool{}, map[uint64]bool{} // with content, and the directories of those
	kind := byte(tar.TypeReg)
	for {
		e, err := from.Next()
		if errors.Is(err, io.EOF) {
			return "", nil
		}
		if err != nil {
			return "", err
		}
		if e.Type == tarsplit.SegmentType {
			if n := len(e.Payload); n >= headerSize { // the header of the next entry is at its end
				kind = e.Payload[n-headerSize+headerType]
			}
			continue
		}
		name := path.Clean("/" + e.GetName())
		id := maphash.String(seed, name)
		if files[id] || kind != tar.TypeDir && above[id] {
			return name, nil
		}
		if e.Size == 0 {
			continue
		}
		files[id] = true
		for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
			id := maphash.String(seed, dir)
			if above[id] {
				break
			}
			above[id] = true
		}
	}
}
