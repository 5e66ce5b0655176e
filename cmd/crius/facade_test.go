package main

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/crius-run/crius/server"
)

// A server finds the socket that a server with another configuration has left.
func TestFacadeMoves(t *testing.T) {
	dir := t.TempDir()
	runRoot := filepath.Join(dir, "run")
	if err := os.Mkdir(runRoot, 0o700); err != nil {
		t.Fatal(err)
	}
	first, second := filepath.Join(dir, "first", "crio.sock"), filepath.Join(dir, "second", "crio.sock")
	listen := func(socket string) net.Listener {
		t.Helper()
		cfg := server.DefaultConfig()
		cfg.Listen = socket
		l, err := server.Listen(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	exists := func(path string, want bool) {
		t.Helper()
		if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) == want {
			t.Errorf("%s: %v", path, err)
		}
	}
	place := func(socket string) {
		t.Helper()
		if err := placeFacade(runRoot, socket); err != nil {
			t.Fatal(err)
		}
	}
	place("")
	exists(filepath.Join(runRoot, facadeLink), false)
	for range 2 {
		place(first)
		if err := listen(first).Close(); err != nil {
			t.Fatal(err)
		}
	}
	exists(first+".lock", true)
	place(second)
	exists(filepath.Dir(first), false)
	serving := listen(second) // another server listens there now
	place("")
	exists(second, true)
	exists(filepath.Join(runRoot, facadeLink), false)
	if err := serving.Close(); err != nil {
		t.Fatal(err)
	}
	place("")
	exists(second+".lock", true) // it belongs to the other server
}
