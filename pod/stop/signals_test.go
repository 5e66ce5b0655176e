package stop

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestWhySignalHasNoEffect(t *testing.T) {
	t.Parallel()
	const term = 1 << (unix.SIGTERM - 1)
	for name, test := range map[string]struct {
		pids                              string
		pending, blocked, ignored, caught uint64
		discarded, waits                  string // words of the reason
	}{
		"init with a handler":                {pids: "4711\t1", caught: term},
		"init without a handler":             {pids: "4711\t1", discarded: "no handler for the signal when looked at: if it had none"},
		"init with another signal's handler": {pids: "4711\t1", caught: 1 << (unix.SIGINT - 1), discarded: "no handler"},
		"init that ignores it":               {pids: "4711\t1", ignored: term, discarded: "ignores"},
		"init with a signalfd":               {pids: "4711\t1", blocked: term},
		"init asleep in sigwait":             {pids: "4711\t1", discarded: "such as tini"},
		"init that has not taken it":         {pids: "4711\t1", blocked: term, pending: term, waits: "pending"},
		"init of a nested namespace":         {pids: "4711\t17\t1", discarded: "no handler"},
		"in a PID namespace that it shares":  {pids: "4711\t17"},
		"in the node's PID namespace":        {pids: "4711"},
		"in the node's, and ignores it":      {pids: "4711", ignored: term, discarded: "ignores"},
	} {
		status := fmt.Sprintf("Name:\tx\nNSpid:\t%s\nShdPnd:\t%016x\nSigBlk:\t%016x\nSigIgn:\t%016x\nSigCgt:\t%016x\nCapInh:\t0\n",
			test.pids, test.pending, test.blocked, test.ignored, test.caught)
		for what, got := range map[string][2]string{
			"discarded": {discarded(status, unix.SIGTERM), test.discarded},
			"pending":   {pending(status, unix.SIGTERM), test.waits},
		} {
			if (got[0] == "") != (got[1] == "") || !strings.Contains(got[0], got[1]) {
				t.Errorf("%s: %s because %q, want %q", name, what, got[0], got[1])
			}
		}
	}
	if why := discarded("", unix.SIGTERM) + pending("", unix.SIGTERM); why != "" {
		t.Errorf("of a process that is gone: %q", why)
	}
}
