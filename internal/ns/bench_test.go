package ns

import (
	"testing"
	"time"
)

func BenchmarkCreateRemove(b *testing.B) {
	ids := []IDMap{{0, 100000, 65536}}
	for _, c := range []struct {
		name string
		spec Spec
	}{
		{"net", Spec{Net: true}},
		{"ipc+uts", Spec{IPC: true, UTS: true}},
		{"net+ipc+uts", Spec{Net: true, IPC: true, UTS: true}},
		{"user+net+ipc+uts", Spec{Net: true, IPC: true, UTS: true, UIDs: ids, GIDs: ids}},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := c.spec
			s.Dir, s.Name = b.TempDir(), "bench"
			var making time.Duration
			for b.Loop() {
				start := time.Now()
				create(b, s)
				making += time.Since(start)
				remove(b, s)
			}
			b.ReportMetric(float64(making.Microseconds())/float64(b.N), "create-µs/op")
		})
	}
}

func BenchmarkDo(b *testing.B) {
	s := spec(b)
	set := create(b, s)
	for b.Loop() {
		if err := Do(set.Net, func() error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
	remove(b, s)
}
