// Package cdi gives containers the devices that vendors describe in files on
// the node (Container Device Interface). The files are the node's own and are
// trusted, including their hooks; the names of devices come from requests.
package cdi

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/crius-run/crius/internal/fault"
)

// Devices returns the qualified names (vendor.com/class=device) of the devices
// that a container requests, each once: in its field or, with older kubelets
// and device plugins, in annotations whose keys begin with cdi.k8s.io/. A
// malformed annotation is fault.Invalid.
func Devices(c *cri.ContainerConfig) ([]string, error) {
	var names []string
	for _, d := range c.GetCDIDevices() {
		names = append(names, d.GetName())
	}
	annotations := c.GetAnnotations()
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		_, annotated, err := cdi.ParseAnnotations(map[string]string{key: annotations[key]})
		if err != nil {
			return nil, fmt.Errorf("annotation %s: %w: %w", key, err, fault.Invalid)
		}
		names = append(names, annotated...)
	}
	var once []string
	for _, name := range names {
		if !slices.Contains(once, name) {
			once = append(once, name)
		}
	}
	return once, nil
}

// Inject changes s as the files in dirs say for these devices; files in later
// directories win. It reads the files at every call: that costs only the
// containers that request devices, and finds a file installed a moment ago. A
// device that no file describes is fault.NotFound, one that the node lacks
// fault.Precondition.
func Inject(s *specs.Spec, dirs, devices []string) error {
	if len(devices) == 0 {
		return nil
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dirs...), cdi.WithAutoRefresh(false))
	if err != nil {
		return fmt.Errorf("read CDI files: %w", err)
	}
	missing, err := cache.InjectDevices(s, devices...)
	if len(missing) > 0 {
		return fmt.Errorf("CDI devices %s not described by any file in %s%s: %w",
			strings.Join(missing, ", "), strings.Join(dirs, ", "), unreadable(cache), fault.NotFound)
	}
	if err != nil {
		return fmt.Errorf("CDI devices %s do not fit this node: %w; load the driver, or write the CDI files again: %w",
			strings.Join(devices, ", "), err, fault.Precondition)
	}
	return nil
}

// unreadable lists files that could not be read and may describe the missing
// device.
func unreadable(cache *cdi.Cache) string {
	var text strings.Builder
	found := cache.GetErrors()
	for _, path := range slices.Sorted(maps.Keys(found)) {
		fmt.Fprintf(&text, "; %s cannot be used: %v", path, errors.Join(found[path]...))
	}
	return text.String()
}
