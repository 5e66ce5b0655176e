package cgroup

import (
	"fmt"
	"os"
	"testing"
)

// The cost of one container in each list of stats, and in the metrics that
// kubelets request by default.
func BenchmarkMeter(b *testing.B) {
	path := fmt.Sprintf("/crius-bench-%d/kubepods/burstable/pod0f0f0f0f-0000-0000-0000-000000000000/crius-0", os.Getpid())
	all, _, err := find()
	if err != nil {
		b.Fatal(err)
	}
	for _, h := range all {
		if err := h.make(path); err != nil {
			b.Fatal(err)
		}
	}
	defer Remove(b.Context(), fmt.Sprintf("/crius-bench-%d", os.Getpid()))
	meters, err := NewMeters()
	if err != nil {
		b.Fatal(err)
	}
	meter, err := meters.OfPod().Of(path)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("Read", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if u, err := meter.Read(); err != nil || u.Memory == nil {
				b.Fatal(err, u)
			}
		}
	})
	b.Run("Details", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if d, err := meter.Details(everyPart &^ HugePagesPart); err != nil || d.Memory == nil {
				b.Fatal(err, d)
			}
		}
	})
}
