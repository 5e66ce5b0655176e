package proc

import "sync"

// children are the claims to children of this process.
var children = claims{open: map[int]bool{}, pids: map[int]int{}}

// claims say for which children something waits, or may wait: a command whose runtime is about to
// exit is known to its owner only later, and may be dead by then.
type claims struct {
	mu    sync.Mutex
	begun int          // how many starts have begun
	open  map[int]bool // the starts whose processes are not known yet
	pids  map[int]int  // how often each is claimed: a pid may be used again before its first claim ends
}

// Starting is called before a runtime is started that leaves a process to this one, and known once
// that process is claimed, or will not be.
func Starting() (known func()) {
	children.mu.Lock()
	defer children.mu.Unlock()
	children.begun++
	start := children.begun
	children.open[start] = true
	return func() {
		children.mu.Lock()
		defer children.mu.Unlock()
		delete(children.open, start)
	}
}

// Claim keeps the Reaper from reaping a process at once. The caller calls reaped when it has done so.
func Claim(pid int) (reaped func()) {
	children.mu.Lock()
	defer children.mu.Unlock()
	children.pids[pid]++
	return func() {
		children.mu.Lock()
		defer children.mu.Unlock()
		if children.pids[pid]--; children.pids[pid] == 0 {
			delete(children.pids, pid)
		}
	}
}

func (c *claims) lastStart() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.begun
}

// mayClaim reports whether a process is claimed, or may be by a start up to the last one.
func (c *claims) mayClaim(pid, last int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for start := range c.open {
		if start <= last {
			return true
		}
	}
	return c.pids[pid] > 0
}
