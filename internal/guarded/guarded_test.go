package guarded_test

import (
	"sync"
	"testing"

	"github.com/crius-run/crius/internal/guarded"
)

// Changes are made one at a time, none is lost, and readers never see half a
// change.
func TestValueChangesAreAtomic(t *testing.T) {
	type pair struct{ a, b int }
	const workers, rounds = 8, 1000
	var v guarded.Value[pair]
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range rounds {
				v.Change(func(p *pair) { p.a++; p.b++ })
				if now := v.Now(); now.a != now.b {
					t.Errorf("half of a change was read: %+v", now)
				}
			}
		})
	}
	wg.Wait()
	if now := v.Now(); now.a != workers*rounds {
		t.Errorf("%d changes, and %d were kept", workers*rounds, now.a)
	}
}
