package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// trend is a counter over time.
type trend struct {
	name  string
	noise float64 // growth over the whole run that does not count
	at    []time.Duration
	value []float64
}

func (t *trend) add(at time.Duration, value float64) {
	t.at = append(t.at, at)
	t.value = append(t.value, value)
}

// settled returns the trend without its first third, in which caches fill.
func (t *trend) settled() trend {
	from := len(t.at) / 3
	return trend{name: t.name, noise: t.noise, at: t.at[from:], value: t.value[from:]}
}

// slope returns the growth per hour: the median of the slopes between any two
// samples, which a few outliers do not change (Theil and Sen).
func (t *trend) slope() float64 {
	var all []float64
	for i := range t.at {
		for j := range i {
			if d := (t.at[i] - t.at[j]).Hours(); d > 0 {
				all = append(all, (t.value[i]-t.value[j])/d)
			}
		}
	}
	return median(all)
}

func median(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	mid := len(all) / 2
	if len(all)%2 == 1 {
		return all[mid]
	}
	return (all[mid-1] + all[mid]) / 2
}

// significance returns by how many standard deviations later samples exceed
// earlier ones more often than by chance (Kendall's tau, with its correction
// for ties).
func (t *trend) significance() float64 {
	n := float64(len(t.value))
	s := 0.0
	for i := range t.value {
		for j := range i {
			s += float64(cmp.Compare(t.value[i], t.value[j]))
		}
	}
	variance := n * (n - 1) * (2*n + 5)
	tied := map[float64]float64{}
	for _, v := range t.value {
		tied[v]++
	}
	for _, m := range tied {
		variance -= m * (m - 1) * (2*m + 5)
	}
	if variance <= 0 {
		return 0
	}
	return s / math.Sqrt(variance/18)
}

// grows reports whether a counter increases by more than its noise, and not by
// chance.
func (t *trend) grows() bool {
	const certain = 3.0 // one of seven hundred constant counters appears to grow
	last := t.settled()
	if len(last.at) < 2 {
		return false
	}
	took := (last.at[len(last.at)-1] - last.at[0]).Hours()
	return last.slope()*took > t.noise && last.significance() > certain
}

// String returns a row of the table: first and last value, slope, projected
// growth in a month.
func (t *trend) String() string {
	if len(t.value) == 0 {
		return t.name + ": never measured"
	}
	const month = 30 * 24
	last := t.settled()
	verdict := "flat"
	if t.grows() {
		verdict = "GROWS"
	}
	return fmt.Sprintf("%-34s %10.1f %10.1f %+11.2f/h %+11.0f/month  %+5.1f sigma  %s",
		t.name, t.value[0], t.value[len(t.value)-1], last.slope(), last.slope()*month, last.significance(), verdict)
}
