package layers

import (
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
)

// BoundRepeats returns a store for the layers of one image, added one after the other. A layer that
// has the content of an earlier one needs no download, but is unpacked nevertheless. In total such
// layers may unpack to as many bytes as the earlier layers that repeat none, or to room, whichever
// is more: PutLayer refuses the next one with fault.Invalid.
func BoundRepeats(store cstorage.Store, room int64) cstorage.Store {
	return &boundedStore{Store: store, most: room, sizes: map[digest.Digest]int64{}}
}

type boundedStore struct {
	cstorage.Store
	most            int64                   // bytes that are allowed in any case
	sizes           map[digest.Digest]int64 // bytes, by content that has been unpacked
	first, repeated int64                   // bytes that were unpacked for the first time, and again
}

// PutLayer implements cstorage.Store.
func (s *boundedStore) PutLayer(id, parent string, names []string, mountLabel string, writeable bool, options *cstorage.LayerOptions, diff io.Reader) (*cstorage.Layer, int64, error) {
	if most := max(s.most, s.first); options != nil && s.repeated+s.sizes[options.UncompressedDigest] > most {
		return nil, -1, fmt.Errorf("it has the content of an earlier layer, and layers that repeat others may unpack to %d bytes, in sum; rebuild the image without them: %w",
			most, fault.Invalid)
	}
	layer, size, err := s.Store.PutLayer(id, parent, names, mountLabel, writeable, options, diff)
	if err != nil {
		return layer, size, err
	}
	content, bytes := layer.UncompressedDigest, layer.UncompressedSize
	if c, is := diff.(*counted); is {
		bytes += c.holes - c.before.holes // the library does not count holes
	}
	if _, again := s.sizes[content]; again {
		s.repeated += bytes
	} else {
		s.first += bytes
		s.sizes[content] = bytes
	}
	return layer, size, nil
}
