package backoff

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestPausesDouble(t *testing.T) {
	for _, c := range []struct {
		first, most time.Duration
		want        []time.Duration
	}{
		{1, 8, []time.Duration{1, 2, 4, 8, 8, 8}},
		{3, 10, []time.Duration{3, 6, 10, 10}},
		{5, 5, []time.Duration{5, 5}},
		{9, 5, []time.Duration{5, 5}},
	} {
		pauses, got := New(c.first, c.most), []time.Duration(nil)
		for range c.want {
			got = append(got, pauses.Next())
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("from %d to %d: %d, want %d", c.first, c.most, got, c.want)
		}
	}
}

func TestPauseWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pauses, start := New(time.Second, time.Minute), time.Now()
		for range 3 {
			if !pauses.Pause(t.Context()) {
				t.Error("reported that the context ended")
			}
		}
		if took := time.Since(start); took != 7*time.Second {
			t.Errorf("three pauses took %s, want 7s", took)
		}
		over, cancel := context.WithCancel(t.Context())
		cancel()
		if pauses.Pause(over) {
			t.Error("reported a pause after the end of the context")
		}
	})
}
