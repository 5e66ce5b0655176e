package progress

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// Limits of warnings: registries choose how many they send.
const (
	shownWarnings  = 5    // of one pull
	mostWarnings   = 1000 // of one pull; the library keeps them all until it ends
	recentWarnings = 20   // of all pulls
)

// Warning is what a registry had to say to users about an image (the header Warning of the
// distribution specification).
type Warning struct {
	Time     time.Time `json:"time"`
	Registry string    `json:"registry"`
	Image    string    `json:"image"`
	Text     string    `json:"text"`
}

// Warn counts a warning for the pull of ctx. It reports whether the pull shows it: it is a new one,
// and not one of too many. A pull with far too many is ended.
func (c *Counts) Warn(ctx context.Context, registry, text string) (shown bool) {
	p, ok := ctx.Value(pullKey{}).(*Pull)
	if !ok {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if slices.Contains(p.Warnings, text) { // of another connection to the registry
		return false
	}
	c.Warned.Add(1)
	p.warned++
	if cancel := c.active[p]; p.warned > mostWarnings && cancel != nil {
		cancel(fmt.Errorf("registry %s sent more than %d different warnings: %w", registry, mostWarnings, fault.Unavailable))
	}
	if len(p.Warnings) == shownWarnings {
		return false
	}
	p.Warnings = append(p.Warnings, text)
	c.warnings = append(c.warnings, Warning{time.Now(), registry, p.Image, text})
	c.warnings = c.warnings[max(len(c.warnings)-recentWarnings, 0):]
	return true
}

// Warnings returns the latest warnings of registries, the oldest first.
func (c *Counts) Warnings() []Warning {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.warnings)
}
