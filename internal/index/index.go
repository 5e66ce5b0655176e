// Package index finds objects by their ids and names.
package index

import (
	"fmt"
	"strings"
	"sync"

	"github.com/crius-run/crius/internal/fault"
)

// Index finds objects by id, by prefix of an id and by name. A name is reserved
// before its object is made; the object can be found by its id only once it is
// published. An object that is being removed gives up both.
type Index[N comparable, T any] struct {
	noun string

	mu    sync.RWMutex
	byID  map[string]T
	names map[N]string // name → id
}

// New returns an empty index of objects that errors call noun.
func New[N comparable, T any](noun string) *Index[N, T] {
	return &Index[N, T]{noun: noun, byID: make(map[string]T), names: make(map[N]string)}
}

// Reserve takes name for id, or returns the id that has it.
func (x *Index[N, T]) Reserve(name N, id string) (owner string, ok bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if owner, taken := x.names[name]; taken {
		return owner, false
	}
	x.names[name] = id
	return id, true
}

// Publish makes the object findable by its id.
func (x *Index[N, T]) Publish(id string, object T) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.byID[id] = object
}

// Drop removes the object, and frees its name if the name is still its own.
func (x *Index[N, T]) Drop(name N, id string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.byID, id)
	if x.names[name] == id {
		delete(x.names, name)
	}
}

// Knows reports whether id belongs to an object, or to one that is being made.
func (x *Index[N, T]) Knows(id string) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if _, ok := x.byID[id]; ok {
		return true
	}
	for _, named := range x.names {
		if named == id {
			return true
		}
	}
	return false
}

// Find returns the object for a full id, or for a prefix that fits exactly one
// object.
func (x *Index[N, T]) Find(id string) (T, error) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	object, ok := x.byID[id]
	if ok {
		return object, nil
	}
	matches := 0
	if id != "" {
		for full, candidate := range x.byID {
			if strings.HasPrefix(full, id) {
				object = candidate
				matches++
			}
		}
	}
	var none T
	switch matches {
	case 1:
		return object, nil
	case 0:
		return none, fmt.Errorf("%s %q %w", x.noun, id, fault.NotFound)
	default:
		return none, fmt.Errorf("%s ID prefix %q is ambiguous (%d matches), use more digits: %w", x.noun, id, matches, fault.Invalid)
	}
}

// All returns a snapshot in no particular order.
func (x *Index[N, T]) All() []T {
	x.mu.RLock()
	defer x.mu.RUnlock()
	objects := make([]T, 0, len(x.byID))
	for _, object := range x.byID {
		objects = append(objects, object)
	}
	return objects
}
