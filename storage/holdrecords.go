package storage

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	cstorage "go.podman.io/storage"
	"go.podman.io/storage/types"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/durable"
)

// Holds as records of containers/storage. Other tools share the records, and may delete them:
// podman rm accepts the name of a hold like any other.

// The ids of a hold's record and layer follow from the image, so a record that a crash has left is
// found, and incomplete ones are overwritten.
func holdID(image string) string    { return digestOf(holdPrefix + image) }
func holdLayer(image string) string { return digestOf(holdPrefix + "layer-" + image) }

func digestOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// isHold reports whether a record is a hold, not a container of another program.
func isHold(c *cstorage.Container) bool {
	return c.ID == holdID(c.ImageID) || len(c.Names) > 0 && strings.HasPrefix(c.Names[0], holdPrefix)
}

// makeRecord makes the record for an image, unless it exists.
func (h *holds) makeRecord(ctx context.Context, image string) error {
	err := trace.Call(ctx, "create image reference", func() error {
		_, err := h.store.CreateContainer(holdID(image), []string{holdPrefix + image}, image, holdLayer(image), "",
			&cstorage.ContainerOptions{
				IDMappingOptions: types.IDMappingOptions{HostUIDMapping: true, HostGIDMapping: true},
				LabelOpts:        []string{"disable"},
			})
		return err
	})
	if err != nil && !errors.Is(err, cstorage.ErrDuplicateID) && !errors.Is(err, cstorage.ErrDuplicateName) {
		return fmt.Errorf("create reference of image %s: %w", image, err)
	}
	return nil
}

// lost reports whether a record that was made no longer exists. While another process has the
// records locked it returns false, because root file systems do not wait for that lock.
func (h *holds) lost(image string) bool {
	if h.locks.Held(durable.ToWrite) != nil {
		return false
	}
	_, err := h.store.Container(holdID(image))
	return errors.Is(err, cstorage.ErrContainerUnknown)
}

// missing returns the images in use that have no record. live are root file systems that are known
// to exist: a read-only store knows no others.
func (h *holds) missing(live []Rootfs) ([]string, error) {
	records, err := h.records()
	if err != nil {
		return nil, err
	}
	looking := h.owned() != nil
	var candidates []string
	if looking {
		for _, r := range live {
			candidates = append(candidates, r.ImageID)
		}
	} else {
		h.mu.Lock()
		candidates = slices.Collect(maps.Keys(h.images))
		h.mu.Unlock()
	}
	slices.Sort(candidates)
	return slices.DeleteFunc(slices.Compact(candidates), func(image string) bool {
		if _, held := records[image]; held {
			return true
		}
		one := h.acquire(image) // the record of a new one is made before it gets a user
		defer h.release(one)
		return !looking && (len(one.users) == 0 || !h.lost(image))
	}), nil
}

// heal makes the missing record for an image in use.
func (h *holds) heal(ctx context.Context, image string) error {
	if err := h.owned(); err != nil {
		return err
	}
	one := h.acquire(image)
	defer h.release(one)
	if len(one.users) == 0 {
		return nil
	}
	return h.keep(ctx, one)
}

// records returns the images with a hold.
func (h *holds) records() (map[string]bool, error) {
	if err := h.locks.Usable(); err != nil {
		return nil, err
	}
	containers, err := h.store.Containers()
	if err != nil {
		return nil, err
	}
	found := map[string]bool{}
	for _, c := range containers {
		if len(c.Names) == 1 && strings.HasPrefix(c.Names[0], holdPrefix) && c.ID == holdID(c.ImageID) {
			found[c.ImageID] = true
		}
	}
	return found, nil
}
