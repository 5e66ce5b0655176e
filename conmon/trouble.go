package conmon

import "github.com/crius-run/crius/conmon/wire"

// LogTrouble says why a container's log lacks what the container writes. The zero value
// means that it does not.
type LogTrouble struct {
	Reason  string // LogBlocked or LogDetached
	Message string // with the path of the log
}

// Reasons of a LogTrouble.
const (
	// LogBlocked: the file system refuses to write. The monitor keeps trying and the
	// container waits in its own writes, so nothing is lost.
	LogBlocked = "LogBlocked"
	// LogDetached: the log's file was deleted, moved or replaced. The monitor writes on to
	// that file until the log is reopened.
	LogDetached = "LogDetached"
)

// LogTrouble returns the trouble of the log as the monitor reported it last, and a channel
// that is closed when there is news. Monitors of earlier releases report none.
func (c *Client) LogTrouble() (now LogTrouble, changed <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.changed == nil {
		c.changed = make(chan struct{})
	}
	return c.trouble, c.changed
}

// noteTrouble is called with mu held.
func (c *Client) noteTrouble(m wire.Message) {
	now := LogTrouble{}
	switch m.Num[0] {
	case wire.LogBlocked:
		now = LogTrouble{LogBlocked, m.Text}
	case wire.LogDetached:
		now = LogTrouble{LogDetached, m.Text}
	}
	if now == c.trouble {
		return
	}
	c.trouble = now
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}
