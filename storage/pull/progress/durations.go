package progress

import (
	"sync"
	"time"
)

// Classes of images by the bytes of their layers as the registry has them.
var classes = []struct {
	name  string
	below int64
}{{"0-10MB", 10e6}, {"10MB-100MB", 100e6}, {"100MB-1GB", 1e9}, {"1GB-10GB", 10e9}, {"over 10GB", 0}}

// Bounds are the upper bounds of a histogram of pulls' durations, in seconds.
var Bounds = []float64{0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600}

// Durations counts how long pulls took that brought an image, by its size. The zero value is ready.
type Durations struct {
	mu      sync.Mutex
	classes map[string]*Histogram
}

// Histogram counts durations of images of one size.
type Histogram struct {
	Count  uint64
	Sum    time.Duration
	Within map[float64]uint64 // durations of at most that many seconds
}

// Note counts a pull.
func (d *Durations) Note(size int64, took time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.of(className(size))
	h.Count++
	h.Sum += took
	for _, bound := range Bounds {
		if took.Seconds() <= bound {
			h.Within[bound]++
		}
	}
}

func className(size int64) string {
	for _, c := range classes {
		if size < c.below || c.below == 0 {
			return c.name
		}
	}
	return ""
}

func (d *Durations) of(class string) *Histogram {
	if d.classes == nil {
		d.classes = map[string]*Histogram{}
		for _, c := range classes { // 0 is a value for comparisons
			d.classes[c.name] = &Histogram{Within: map[float64]uint64{}}
			for _, bound := range Bounds {
				d.classes[c.name].Within[bound] = 0
			}
		}
	}
	return d.classes[class]
}

// BySize calls show with the histogram of each class of sizes; show must not keep it.
func (d *Durations) BySize(show func(class string, h Histogram)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range classes {
		show(c.name, *d.of(c.name))
	}
}
