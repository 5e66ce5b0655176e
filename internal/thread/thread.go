// Package thread runs functions on OS threads that end afterwards.
package thread

import (
	"errors"
	"runtime"

	"golang.org/x/sys/unix"
)

// Run runs f on an OS thread that ends with it, so that f may change attributes
// of the thread (namespaces, cgroups, user ids) and need not undo it. Processes
// that f starts inherit them; goroutines do not. A panic in f becomes the
// caller's.
//
// The end of the thread also kills every process that f has started with a
// parent death signal.
func Run(f func() error) error {
	end := make(chan outcome, 1)
	go run(f, end)
	out := <-end
	if out.panic != nil {
		panic(out.panic)
	}
	return out.err
}

// outcome is how a function ended.
type outcome struct {
	err   error
	panic any
}

func run(f func() error, end chan<- outcome) {
	runtime.LockOSThread() // a goroutine that ends while locked ends its thread
	if unix.Gettid() == unix.Getpid() {
		// Go cannot end the main thread, to which /proc/self refers. While this
		// goroutine holds it, the next one gets another.
		elsewhere := make(chan outcome, 1)
		go run(f, elsewhere)
		end <- <-elsewhere
		runtime.UnlockOSThread()
		return
	}
	out := outcome{err: errors.New("the function ended its goroutine")}
	defer func() {
		out.panic = recover()
		end <- out
	}()
	out.err = f()
}
