package cgroup

import "sync/atomic"

var (
	moving  atomic.Int32 // callers of Warm that are not done
	warming atomic.Bool  // somebody waits in warm
)

// Warm gets the kernel ready, in the background, for the move of a process into
// another cgroup, which an OCI runtime is about to do. The first such move in some
// 20 ms waits for an RCU grace period: about 10 ms on an idle machine, and twice
// that on one where things have just been created and removed. So long as the
// runtime is still being started, that time costs nobody anything.
//
// The caller says when the runtime is done. While others are at it nothing
// happens: they keep the kernel ready, and would only have to wait for one more.
//
// What it does is to move this process to where it is. In a v1 hierarchy that
// could take threads away from Start; the kernel's lock is the same for all, and
// where there is no v2 hierarchy nothing is done.
func Warm() (done func()) {
	if moving.Add(1) == 1 && warming.CompareAndSwap(false, true) {
		go func() {
			defer warming.Store(false)
			_ = warm() // then the runtime waits itself
		}()
	}
	return func() { moving.Add(-1) }
}

func warm() error {
	all, _, err := find()
	if err != nil {
		return err
	}
	for _, h := range all {
		if h.v2() {
			return write(h.dir(h.own)+"/cgroup.procs", "0")
		}
	}
	return nil
}
