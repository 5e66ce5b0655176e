package main

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"

	"github.com/crius-run/crius/cmd/crius/config"
	podstatus "github.com/crius-run/crius/pod/status"
	"github.com/crius-run/crius/server"
	"github.com/crius-run/crius/server/stream"
	"github.com/crius-run/crius/test/kit/wait"
)

// A server whose image store is lost ends with the reason, so that its service manager
// restarts it.
func TestServerEndsWhenTheStoreIsLost(t *testing.T) {
	t.Parallel()
	cfg := config.Default().API
	cfg.Listen = filepath.Join(t.TempDir(), "s")
	cfg.StreamAddress = "127.0.0.1:0"
	sessions, err := stream.New(cfg.Stream(), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := errors.New("lost")
	lost := func(context.Context) error { return want }
	if err := answer(t.Context(), cfg, manager{}, sessions, lost, server.Services{Engine: noEngine{}, Status: new(podstatus.Node)}); !errors.Is(err, want) {
		t.Errorf("%v, want %v", err, want)
	}
	wait.For(t, "the socket to go", func() bool { // the server may have been stopped before it began
		conn, err := net.Dial("unix", cfg.Listen)
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
}

// noEngine is an engine without subscribers to events.
type noEngine struct{ server.Engine }

func (noEngine) StopEvents() {}
