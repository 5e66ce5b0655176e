// Package foreign lists the containers of other runtimes in an image store: programs share a store
// of containers/storage, and each keeps its containers there as records with layers.
//
// The metadata of a record says which program made it. It is a JSON document of that program:
// CRI-O's names a pod; those of podman and buildah do not.
package foreign

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
)

// CRIO is the Runtime of CRI-O's containers.
const CRIO = "CRI-O"

// Container is a container of another runtime.
type Container struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Runtime string    `json:"runtime,omitempty"` // CRIO; empty: another runtime, such as podman
	Pod     string    `json:"pod,omitempty"`     // of CRI-O: NAMESPACE/NAME
	PodID   string    `json:"podID,omitempty"`
	Created time.Time `json:"created"`
	Layer   string    `json:"layer"`
	Bytes   uint64    `json:"bytes,omitempty"` // of its writable layer, if that was measured
	// Kept says why the container must not be removed: it is in use. Empty: it may be removed.
	Kept string `json:"kept,omitempty"`
}

// metadata are some fields of CRI-O's document.
type metadata struct {
	PodID   string `json:"pod-id"`
	PodName string `json:"pod-name"` // k8s_NAME_NAMESPACE_UID_ATTEMPT
	Name    string `json:"name"`
	Short   string `json:"metadata-name"` // as in CRI: a container's name in its pod
	Infra   bool   `json:"pod"`
}

// read reads the records in the store, and determines from the node's processes which of the
// containers are in use.
func (a *Containers) read() ([]Container, error) {
	records, err := a.Store.Containers()
	if err != nil {
		return nil, fmt.Errorf("read container records: %w", err)
	}
	records = slices.DeleteFunc(records, func(r cstorage.Container) bool { return a.Own(&r) })
	if len(records) == 0 {
		return nil, nil
	}
	users, err := findUsers()
	if err != nil {
		return nil, err
	}
	list := make([]Container, 0, len(records))
	for _, r := range records {
		c := describe(&r)
		c.Kept = users.of(&c)
		if c.Kept == "" {
			c.Kept = a.mounted(c.ID)
		}
		list = append(list, c)
	}
	slices.SortStableFunc(list, func(a, b Container) int {
		return cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.PodID, b.PodID), a.Created.Compare(b.Created))
	})
	return list, nil
}

// mounted says why a container is mounted, as the store counts mounts; empty: it is not.
func (a *Containers) mounted(id string) string {
	switch n, err := a.Store.Mounted(id); {
	case err != nil:
		return fmt.Sprintf("cannot tell whether it is mounted: %v", err)
	case n > 0:
		return "mounted, according to the image store"
	}
	return ""
}

func describe(r *cstorage.Container) Container {
	c := Container{ID: r.ID, Layer: r.LayerID, Created: r.Created}
	if len(r.Names) > 0 {
		c.Name = r.Names[0]
	}
	var m metadata
	if json.Unmarshal([]byte(r.Metadata), &m) != nil || m.PodID == "" || m.PodName == "" {
		return c
	}
	c.Runtime, c.PodID, c.Pod = CRIO, m.PodID, m.PodName
	if parts := strings.Split(m.PodName, "_"); len(parts) == 5 {
		c.Pod = parts[2] + "/" + parts[1]
	}
	switch {
	case m.Infra:
		c.Name = "POD"
	case m.Short != "":
		c.Name = m.Short
	case m.Name != "":
		c.Name = m.Name
	}
	return c
}

// shortest is the minimum number of digits of an id that select a container.
const shortest = 12

// Select returns the containers of CRI-O or, if names are given, those with these ids, beginnings
// of ids or names. A name that fits no container, or several, is an error.
func Select(list []Container, names []string) ([]Container, error) {
	if len(names) == 0 {
		return slices.DeleteFunc(slices.Clone(list), func(c Container) bool { return c.Runtime != CRIO }), nil
	}
	var chosen []Container
	for _, name := range names {
		var found []Container
		for _, c := range list {
			if c.ID == name || c.Name == name || len(name) >= shortest && strings.HasPrefix(c.ID, name) {
				found = append(found, c)
			}
		}
		switch {
		case len(found) == 0:
			return nil, fmt.Errorf("no container of another runtime is called %q: %w", name, fault.NotFound)
		case len(found) > 1:
			return nil, fmt.Errorf("%d containers are called %q: name them by id: %w", len(found), name, fault.Invalid)
		case !slices.ContainsFunc(chosen, func(c Container) bool { return c.ID == found[0].ID }):
			chosen = append(chosen, found[0])
		}
	}
	return chosen, nil
}
