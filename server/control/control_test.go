package control

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What is no request is refused, and nobody but root may ask.
func TestServer(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(socket, nil, 0o600); err != nil { // of a dead server
		t.Fatal(err)
	}
	s, err := Listen(socket, Node{})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	c := NewClient(socket)
	for path, form := range map[string]url.Values{checkPath: {repairKey: {"perhaps"}}, wipePath: nil, holdingsPath: nil, "/": nil} {
		if err := c.ask(t.Context(), http.MethodPost, path, form, new(Checked)); !errors.Is(err, errRefused) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if err := s.Close(context.Background()); err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	if _, err := c.Holdings(t.Context()); err == nil || !strings.Contains(err.Error(), socket) {
		t.Errorf("without a server: %v", err)
	}
}

func TestDone(t *testing.T) {
	if !(Wiped{}).Done() || (Wiped{Errors: texts(nil, errors.New("x"))}).Done() {
		t.Error("what could not be done is not done")
	}
}
