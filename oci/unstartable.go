package oci

import (
	"context"
	"sync"
	"time"

	"github.com/crius-run/crius/conmon"
)

// unstartable is a container that the runtime has refused to create.
type unstartable struct {
	gone
	exitFile string
	code     int32

	mu   sync.Mutex
	over chan struct{} // closed once exit is recorded
}

// Unstartable is the Task of a container that the runtime could not create and of
// which nothing is left there: cause, a ProgramError, is what Start and all else
// that needs a process fails with. Kill is its end, which is recorded as that of
// any other container, with code.
func Unstartable(ref Ref, cause error, code int32) Task {
	return &unstartable{gone: gone{why: cause}, exitFile: ref.ExitFile, code: code, over: make(chan struct{})}
}

func (u *unstartable) Kill(context.Context) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	select {
	case <-u.over:
		return nil
	default:
	}
	exit := conmon.Exit{Code: u.code, FinishedAt: time.Now()}
	if err := conmon.WriteExit(u.exitFile, exit); err != nil {
		return err
	}
	u.exit = exit
	close(u.over)
	return nil
}

func (u *unstartable) Exited() <-chan struct{} { return u.over }
