package stream

import (
	"testing"
	"time"
)

// A clock that is set must neither cut all sessions off nor let silent ones
// stay. The time of day is no part of what is kept: a connection of a thousand
// hours ago has been silent for as long as it says.
func TestSilenceIsNotTakenFromTheClock(t *testing.T) {
	c := &conn{began: time.Now().Add(-1000 * time.Hour)}
	if silent := c.silence(); silent < 1000*time.Hour || silent > 1001*time.Hour {
		t.Errorf("before anything was said: %v", silent)
	}
	c.use(1)
	if kept := time.Duration(c.used.Load()); kept > 1001*time.Hour { // since 1970 it would be half a million
		t.Errorf("the time of day is kept: %v", kept)
	}
	if silent := c.silence(); silent > time.Hour {
		t.Errorf("just after something was said: %v", silent)
	}
}
