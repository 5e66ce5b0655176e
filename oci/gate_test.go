package oci

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/crius-run/crius/internal/fault"
)

// A checkpoint waits for commands that are being started; those that come later, and kills, wait for its end.
func TestGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		leave, err := g.enter(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.shut(t.Context()); !errors.Is(err, fault.Unavailable) {
			t.Errorf("shut while a command is being started: %v", err)
		}
		var open func()
		go func() { open, err = g.shut(t.Context()) }()
		synctest.Wait()
		if open != nil {
			t.Error("it did not wait for the command that is being started")
		}
		var killed, entered bool
		g.soon(t.Context(), func(context.Context) { killed = true })
		ctx, cancel := context.WithCancel(t.Context())
		refused := make(chan error)
		go func() { _, err := g.enter(ctx); refused <- err }()
		go func() {
			leave, err := g.enter(t.Context())
			if entered = err == nil; entered {
				leave()
			}
		}()
		leave()
		synctest.Wait()
		if open == nil || err != nil || killed || entered {
			t.Fatalf("during the checkpoint: shut: %v; killed: %t, started: %t", err, killed, entered)
		}
		cancel()
		if err := <-refused; !errors.Is(err, fault.Unavailable) {
			t.Errorf("a command whose time is up meanwhile: %v", err)
		}
		open()
		synctest.Wait()
		if !killed || !entered {
			t.Errorf("after it: killed: %t, started: %t", killed, entered)
		}
		killed = false
		g.soon(t.Context(), func(context.Context) { killed = true })
		if !killed {
			t.Error("without a checkpoint a kill is waited for")
		}
	})
}
