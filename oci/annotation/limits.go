package annotation

import (
	"fmt"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/spec"
)

// Requests of crius's own, which the name of a container may follow.
const (
	ownDomain    = ".crius.run"
	askLayerSize = "writable-layer-size" + ownDomain
	askUlimits   = "ulimits" + ownDomain
)

// LayerSizeKey is containerd's request for a limit of the writable layer, which may be an annotation
// of the pod or of the container.
const LayerSizeKey = "containerd.io/snapshot/max-size"

// AllowsLayerSize reports whether allowed annotations include a request for a limit of the writable
// layer.
func AllowsLayerSize(allowed []string) bool { return allowsAsked(allowed, askLayerSize) }

// The least size of a writable layer is that of image.writable_layer_size. The largest is more than
// any disk has: quotas of larger sizes would overflow in the kernel.
const (
	leastLayer   = 1 << 20
	largestLayer = 1 << 60
)

// ParseLayerSize reads the size of a writable layer, such as 10Gi.
func ParseLayerSize(text string) (int64, error) {
	size, err := parseQuantity(strings.TrimSpace(text))
	if err != nil {
		return 0, err
	}
	if size < leastLayer || size > largestLayer {
		return 0, invalid("must be at least 1Mi, so that the container can start, and at most 1048576Ti, got %.40q", text)
	}
	return size, nil
}

// readLayerSize reads the size for one container, or for all others. Two keys for the same must have
// the same value: which of them the pod means is unknown.
func (a *Asked) readLayerSize(container, value string) error {
	size, err := ParseLayerSize(value)
	if err != nil {
		return err
	}
	if other, twice := a.layers[container]; twice && other != size {
		return invalid("%s and %s ask for writable layers of %d and %d bytes; remove one of them", LayerSizeKey, askLayerSize, other, size)
	}
	if a.layers == nil {
		a.layers = map[string]int64{}
	}
	a.layers[container] = size
	return nil
}

// LayerSize returns how many bytes the writable layer of a container may have, by the annotation that
// names it, or else by one for all containers of the pod; 0: not requested.
func (a Asked) LayerSize(container string) int64 {
	if size, own := a.layers[container]; own {
		return size
	}
	return a.layers[""]
}

// readUlimits reads NAME=SOFT:HARD or NAME=BOTH, separated by commas.
func (a *Asked) readUlimits(container, value string, allowed []string) error {
	var limits []specs.POSIXRlimit
	for item := range strings.SplitSeq(value, ",") {
		limit, err := spec.ParseUlimit(strings.TrimSpace(item))
		if err != nil {
			return err
		}
		if slices.ContainsFunc(limits, func(other specs.POSIXRlimit) bool { return other.Type == limit.Type }) {
			return invalid("ulimit %.80q: the limit is given twice", item)
		}
		if err := checkUlimit(limit, strings.TrimSpace(item), allowed); err != nil {
			return err
		}
		limits = append(limits, limit)
	}
	if a.ulimits == nil {
		a.ulimits = map[string][]specs.POSIXRlimit{}
	}
	a.ulimits[container] = limits
	return nil
}

func checkUlimit(limit specs.POSIXRlimit, text string, allowed []string) error {
	for _, most := range allowed {
		if most, err := spec.ParseUlimit(most); err == nil && most.Type == limit.Type && limit.Hard <= most.Hard {
			return nil
		}
	}
	return fmt.Errorf("ulimit %.80q is not in pod.allowed_ulimits, or above the limit there: %w", text, fault.Denied)
}

// Ulimits returns what a container requests: the annotation that names it comes before one for all
// containers of the pod, for each limit.
func (a Asked) Ulimits(container string) []specs.POSIXRlimit {
	return spec.MergeUlimits(a.ulimits[""], a.ulimits[container])
}
