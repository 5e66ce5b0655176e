package conmon

import (
	"context"
	"errors"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

// LogCount counts bytes of a container's log.
type LogCount struct {
	Written     uint64
	Discarded   uint64 // because they exceeded its limit
	JournalLost uint64 // because journald did not accept them
}

// Plus returns the sum.
func (c LogCount) Plus(o LogCount) LogCount {
	return LogCount{c.Written + o.Written, c.Discarded + o.Discarded, c.JournalLost + o.JournalLost}
}

// Logged returns by how many bytes the container's log, rotated files included,
// has grown since this client connected, how many were discarded by its limit,
// and how many did not reach the journal. If the monitor does not answer, it
// returns what the monitor last reported.
func (c *Client) Logged(ctx context.Context) LogCount {
	if known, final := c.loggedAtRest(); final {
		return known
	}
	if err := c.request(ctx, wire.Message{Verb: wire.CountLog}); errors.Is(err, fault.Precondition) {
		select { // it has exited, and its last message may not have been read
		case <-c.gone:
		case <-ctx.Done():
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return LogCount{c.logged.own(), c.discarded.own(), c.lost.own()}
}

// loggedAtRest returns the counts while the monitor rests, which a request
// would end.
func (c *Client) loggedAtRest() (known LogCount, rests bool) {
	c.mu.Lock()
	known, rests = LogCount{c.logged.own(), c.discarded.own(), c.lost.own()}, c.rests
	met := c.met || c.dormant == nil
	c.mu.Unlock()
	return known, rests && (met || c.dormant.still(c.dir))
}

// count is a growing number that a monitor reports.
type count struct {
	now       uint64
	inherited uint64 // its value when this client connected
	known     bool   // inherited is known
}

func (c *count) note(n uint64) {
	c.now = max(c.now, n) // half a record may be taken back
	if !c.known {
		c.known, c.inherited = true, c.now
	}
}

func (c *count) own() uint64 { return c.now - c.inherited }
