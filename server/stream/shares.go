package stream

import "sync"

// party is who takes a place: a container or pod, and the namespace that it is in.
type party struct{ namespace, target string }

// shares are a number of places, some of which are kept for parties that have few or none. A
// namespace may take up to nine tenths of the places, which its containers or pods share.
// Places in use are never taken back, so later parties get smaller parts, but each of many
// gets one.
type shares struct {
	most       int // 0: any number
	sum        int
	namespaces map[string]int
	targets    map[string]int
}

// mayTake reports whether someone who has some of size places, of which so many are
// free, may take another. The first nine tenths are for anybody, the last tenth for
// those who have fewer than are free, and the last twentieth for those who have none.
// Of fewer than 16 places none is kept.
func mayTake(has, free, size int) bool {
	switch {
	case free <= 0:
		return false
	case size < keepFrom || free > size/10:
		return true
	case free > size/20:
		return has < free
	}
	return has == 0
}

// keepFrom is the least number of places of which some are kept.
const keepFrom = 16

func newShares(most int) *shares {
	return &shares{most: most, namespaces: make(map[string]int), targets: make(map[string]int)}
}

// admits reports whether p may take another place.
func (s *shares) admits(p party) bool {
	if s.most <= 0 {
		return true
	}
	namespace := s.namespaces[p.namespace]
	part := s.most
	if s.most >= keepFrom {
		part -= s.most / 10
	}
	return mayTake(namespace, s.most-s.sum, s.most) && mayTake(s.targets[p.target], part-namespace, part)
}

// take takes n places for p, or none at all if not all of them are admitted.
func (s *shares) take(p party, n int) bool {
	for taken := range n {
		if !s.admits(p) {
			s.count(p, -taken)
			return false
		}
		s.count(p, 1)
	}
	return true
}

// count takes n places for p, or gives them back if n is negative.
func (s *shares) count(p party, n int) {
	s.sum += n
	add(s.namespaces, p.namespace, n)
	add(s.targets, p.target, n)
}

func add(counts map[string]int, key string, n int) {
	if counts[key] += n; counts[key] == 0 {
		delete(counts, key)
	}
}

// forwards are the connections into pods.
type forwards struct {
	mu     sync.Mutex
	places *shares
}

// take takes n places for p, or none at all if not all of them are admitted.
func (f *forwards) take(p party, n int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.places.take(p, n)
}

func (f *forwards) release(p party, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.places.count(p, -n)
}
