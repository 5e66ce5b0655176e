package nri

import (
	"fmt"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// creationTime is how long the creation of a container delays the synchronization of new
// plugins, and with it the events of all other pods. Runtimes take less, unless they hang.
const creationTime = 20 * time.Second

// creation keeps new plugins from connecting while a container is created: from the answers of
// plugins until Node.Containers returns the container.
type creation struct {
	plugins      *Plugins
	release      func()
	synchronized uint64        // synchronizations before it
	timer        *time.Timer   // releases the hold; nil: the hold lasts
	lapsed       chan struct{} // closed when the timer has released the hold
}

// creation takes over a hold, and releases it after CreationTime.
func (p *Plugins) creation(release func()) *creation {
	c := &creation{plugins: p, release: release}
	if p != nil {
		c.synchronized, c.lapsed = p.synchronized.Load(), make(chan struct{})
		c.timer = time.AfterFunc(p.CreationTime, func() { release(); close(c.lapsed) })
	}
	return c
}

// confirm makes the hold last until end. It is fault.Unavailable if the hold
// has lapsed and a plugin has synchronized since: that plugin knows nothing of
// the container.
func (c *creation) confirm() error {
	timer := c.timer
	c.timer = nil
	if timer == nil || timer.Stop() {
		return nil
	}
	<-c.lapsed
	c.release, _ = c.plugins.hold()
	if c.plugins.synchronized.Load() == c.synchronized {
		return nil
	}
	return fmt.Errorf("the runtime took longer than %s to create the container, and an NRI plugin that connected meanwhile was not asked about it; the kubelet will create it again: %w",
		c.plugins.CreationTime, fault.Unavailable)
}

// end releases what is still held.
func (c *creation) end() {
	if c.timer == nil || c.timer.Stop() {
		c.release()
	}
}
