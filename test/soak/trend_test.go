package main

import (
	"math/rand/v2"
	"testing"
	"time"
)

// sampled is a trend of sixty samples in an hour.
func sampled(noise float64, value func(i float64) float64) *trend {
	t := &trend{name: "x", noise: noise}
	for i := range 60 {
		t.add(time.Duration(i)*time.Minute, value(float64(i)))
	}
	return t
}

func TestTrendsThatGrow(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for name, c := range map[string]*trend{
		"a leak":                    sampled(0.5, func(i float64) float64 { return i }),
		"one in ten minutes":        sampled(0.5, func(i float64) float64 { return float64(int(i / 10)) }),
		"a leak below noise":        sampled(0.5, func(i float64) float64 { return 100 + i + 20*random.Float64() }),
		"a leak with outliers":      sampled(0.5, func(i float64) float64 { return i + 1000*float64(int(random.Float64()*1.1)) }),
		"a leak after the warm-up":  sampled(0.5, func(i float64) float64 { return max(0, i-25) }),
		"memory by a MiB an hour":   sampled(0.5, func(i float64) float64 { return 20 + i/60 + 0.1*random.Float64() }),
		"growth that slows to half": sampled(0.5, func(i float64) float64 { return 100 * (1 + i/120) * (1 + i/120) }),
	} {
		if !c.grows() {
			t.Errorf("%s does not count as growth: %v", name, c)
		}
	}
}

func TestTrendsThatAreFlat(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for name, c := range map[string]*trend{
		"constant":               sampled(0.5, func(float64) float64 { return 7 }),
		"noise":                  sampled(0.5, func(float64) float64 { return 100 * random.Float64() }),
		"a warm-up":              sampled(0.5, func(i float64) float64 { return min(i, 10) }),
		"one that has come late": sampled(1.5, func(i float64) float64 { return float64(int(i / 50)) }),
		"what is noise":          sampled(5, func(i float64) float64 { return i / 20 }),
		"what shrinks":           sampled(0.5, func(i float64) float64 { return 100 - i }),
		"one sample":             {name: "x", at: []time.Duration{0}, value: []float64{1}},
		"none":                   {name: "x"},
	} {
		if c.grows() {
			t.Errorf("%s counts as growth: %v", name, c)
		}
	}
}

func TestSlopeIsPerHour(t *testing.T) {
	if got := sampled(0, func(i float64) float64 { return 2 * i }).slope(); got != 120 {
		t.Errorf("two a minute are %v an hour", got)
	}
}
