package cgroup

import "sync/atomic"

var (
	moving  atomic.Int32 // callers of Warm that are not done
	warming atomic.Bool  // a goroutine waits in warm
)

// Warm prepares the kernel, in the background, for the move of a process into
// another cgroup, which an OCI runtime is about to do. The first such move in
// some 20 ms waits for an RCU grace period: about 10 ms on an idle machine, and
// twice that on one where things have just been created and removed. While the
// runtime is still starting, that wait costs nothing.
//
// The caller calls done when the runtime has exited. While other callers are at
// it Warm does nothing: they keep the kernel prepared, and would only have to
// wait for one more.
//
// Warm moves this process to the cgroup in which it already is. In a v1
// hierarchy that could take threads away from Start; the kernel's lock is
// shared by all hierarchies, and without a v2 hierarchy Warm does nothing.
func Warm() (done func()) {
	if moving.Add(1) == 1 && warming.CompareAndSwap(false, true) {
		go func() {
			defer warming.Store(false)
			_ = warm() // then the runtime itself waits
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
