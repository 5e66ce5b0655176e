package conmon

import (
	"context"
	"errors"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

// LogCount is bytes of a container's log.
type LogCount struct {
	Written     uint64
	Discarded   uint64 // since they exceeded its limit
	JournalLost uint64 // since journald did not take them
}

// Plus is the sum.
func (c LogCount) Plus(o LogCount) LogCount {
	return LogCount{c.Written + o.Written, c.Discarded + o.Discarded, c.JournalLost + o.JournalLost}
}

// Logged is how many bytes the container's log, rotated files included, has grown since
// this client connected, how many were discarded for its limit, and how many the journal
// has not got. If the monitor does not answer, it is what the monitor last reported.
func (c *Client) Logged(ctx context.Context) LogCount {
	if known, final := c.loggedAtRest(); final {
		return known
	}
	if err := c.request(ctx, wire.Message{Verb: wire.CountLog}); errors.Is(err, fault.Precondition) {
		select { // it has left, and its last word may not have been read
		case <-c.gone:
		case <-ctx.Done():
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return LogCount{c.logged.own(), c.discarded.own(), c.lost.own()}
}

// loggedAtRest is what Logged is as long as the monitor rests, which a request would end.
func (c *Client) loggedAtRest() (known LogCount, rests bool) {
	c.mu.Lock()
	known, rests = LogCount{c.logged.own(), c.discarded.own(), c.lost.own()}, c.rests
	met := c.met || c.dormant == nil
	c.mu.Unlock()
	return known, rests && (met || c.dormant.still(c.dir))
}

// count is a number that a monitor counts, which grows.
type count struct {
	now       uint64
	inherited uint64 // of which so many before this client came
	known     bool   // inherited is
}

func (c *count) note(n uint64) {
	c.now = max(c.now, n) // half a record may be taken back
	if !c.known {
		c.known, c.inherited = true, c.now
	}
}

func (c *count) own() uint64 { return c.now - c.inherited }
