package selinux

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/crius-run/crius/internal/fault"
)

// Levels are the levels of the node's pods, by pod id.
type Levels struct {
	categories int

	mu sync.Mutex
	of map[string]string
}

// NewLevels returns levels with that many categories.
func NewLevels(categories int) *Levels {
	return &Levels{categories: categories, of: map[string]string{}}
}

// triesPerLevel bounds the search for a free pair. With 1024 categories there are half
// a million of them.
const triesPerLevel = 1000

// Allot gives a pod a level that no other pod has: two categories, so that
// guessing one does not help. It is fault.Exhausted if none is left.
func (l *Levels) Allot(id string) (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	taken := slices.Collect(maps.Values(l.of))
	for range triesPerLevel {
		low, high := rand.IntN(l.categories), rand.IntN(l.categories)
		if low == high {
			continue
		}
		level := fmt.Sprintf("s0:c%d,c%d", min(low, high), max(low, high))
		if !slices.Contains(taken, level) {
			l.of[id] = level
			return level, nil
		}
	}
	return "", fmt.Errorf("no free SELinux level found: %d pods have one, and the policy has %d categories: %w", len(l.of), l.categories, fault.Exhausted)
}

// Note records the level of a pod, which others may have as well.
func (l *Levels) Note(id, level string) {
	if level == "" {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of[id] = level
}

// Free gives a pod's level back.
func (l *Levels) Free(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.of, id)
}
