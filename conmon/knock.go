package conmon

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon/wire"
)

// introduce says that this client knocks, so that its end does not wake a monitor at rest.
// Monitors of earlier releases refuse that, and stay as they are.
func (c *Client) introduce() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.transmit(wire.Append(nil, wire.Message{Verb: wire.Knocks})) == nil {
		c.waiting = append(c.waiting, make(chan error, 1))
	}
}

// knock wakes a monitor at rest, which does not watch this client's connection.
func (c *Client) knock() error {
	conn, err := connect(c.dir)
	if err == nil {
		err = conn.Close()
	}
	if errors.Is(err, unix.EAGAIN) || nobodyListens(err) { // others have knocked, or it has ended
		err = nil
	}
	return err
}
