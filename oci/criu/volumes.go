package criu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// Fields of mnt_entry, a message of criu's images of mounts (images/mnt.proto).
const (
	mountExternal = 13
	mountDeleted  = 16
	mountKey      = 18
)

const (
	mountHeader    = 8        // two magic numbers, before the first message
	maxMountsImage = 16 << 20 // a container has at most some thousand mounts
)

// ReviveVolumes edits the images in dir, for a restore, so that criu mounts the sources that the request has for
// volumes. criu notes if the source of a volume had been deleted on the node, as that of a ConfigMap with a sub
// path is when it is updated, and then makes the source of the request anew, which fails if it exists (criu#9).
// An image that cannot be read is fault.Invalid.
func ReviveVolumes(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "mountpoints-") || !strings.HasSuffix(e.Name(), ".img") {
			continue
		}
		file := filepath.Join(dir, e.Name())
		image, err := regular.Read(file, maxMountsImage)
		if err != nil {
			return err
		}
		revived, changed, err := reviveVolumes(image)
		if err != nil {
			return fmt.Errorf("image %s of the checkpoint: %w: %w", e.Name(), err, fault.Invalid)
		}
		if !changed {
			continue
		}
		if err := os.WriteFile(file, revived, 0o600); err != nil {
			return err
		}
	}
	return nil
}

var errMountsImage = errors.New("it does not consist of criu's messages about mounts")

// reviveVolumes returns an image of mounts in which no external mount is marked as deleted.
func reviveVolumes(image []byte) (revived []byte, changed bool, err error) {
	if len(image) < mountHeader {
		return nil, false, errMountsImage
	}
	revived, image = append(revived, image[:mountHeader]...), image[mountHeader:]
	for len(image) > 0 {
		if len(image) < 4 || uint64(len(image)-4) < uint64(binary.LittleEndian.Uint32(image)) {
			return nil, false, errMountsImage
		}
		size := 4 + binary.LittleEndian.Uint32(image)
		message, err := reviveVolume(image[4:size])
		if err != nil {
			return nil, false, err
		}
		changed = changed || len(message) != int(size)-4
		revived = append(binary.LittleEndian.AppendUint32(revived, uint32(len(message))), message...)
		image = image[size:]
	}
	return revived, changed, nil
}

// reviveVolume returns the message about a mount, without the mark if the mount is external.
func reviveVolume(message []byte) ([]byte, error) {
	var kept []byte
	external := false
	for rest := message; len(rest) > 0; {
		number, _, size := protowire.ConsumeField(rest)
		if size < 0 {
			return nil, errMountsImage
		}
		switch number {
		case mountDeleted:
			rest = rest[size:]
			continue
		case mountExternal, mountKey:
			external = true
		}
		kept, rest = append(kept, rest[:size]...), rest[size:]
	}
	if !external {
		return message, nil
	}
	return kept, nil
}
