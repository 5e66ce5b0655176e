package main

import (
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
)

// clientCommands are commands that only ask a running server.
var clientCommands = []string{"status", "pulls", "pull image", "events", "logs pod", "exec pod -- true", "top", "images", "checkpoint pod"}

// Without a running server, client commands advise to start it and where to find why it
// ended.
func TestAskWithoutAServer(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "crius.sock")
	for what, place := range map[string]func(){
		"no socket": func() {},
		"left by a dead server": func() {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			l.SetUnlinkOnClose(false)
			l.Close()
		},
	} {
		place()
		for _, command := range clientCommands {
			code, _, errs := crius(t, append([]string{"--api-listen", socket}, strings.Fields(command)...)...)
			if want := "crius: no server at " + socket + ": start it (systemctl start crius)"; code != 1 || !strings.HasPrefix(errs, want) {
				t.Errorf("%s, crius %s: exit code %d, %q, want %q", what, command, code, errs, want)
			}
		}
	}
}

// Client commands use the valid part of a broken configuration.
func TestAskWithBrokenConfiguration(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "crius.sock")
	broken := write(t, "broken.toml", "[api]\nlisten = '"+socket+"'\n[nonsense]\n")
	for _, command := range clientCommands {
		code, _, errs := crius(t, append([]string{"--config", broken}, strings.Fields(command)...)...)
		if code != 1 || !strings.HasPrefix(errs, "crius: warning: invalid configuration") || !strings.Contains(errs, "crius: no server at "+socket) {
			t.Errorf("crius %s: exit code %d, %q", command, code, errs)
		}
	}
}

// Errors of a server are shown without gRPC's prefix.
func TestAskAnotherServer(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "crius.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	defer srv.Stop()
	go func() { _ = srv.Serve(l) }()
	code, _, errs := crius(t, "--api-listen", socket, "status")
	if want := "crius: server at " + socket + ": unknown service runtime.v1.RuntimeService\n"; code != 1 || errs != want {
		t.Errorf("exit code %d, %q, want %q", code, errs, want)
	}
}

func TestAskASocketOfSomethingElse(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	other := &http.Server{ReadHeaderTimeout: time.Minute}
	t.Cleanup(func() { _ = other.Close() })
	go func() { _ = other.Serve(listener) }()
	for path, want := range map[string]string{
		socket:                      socket + " does not serve CRI: name the socket of crius, api.listen (",
		write(t, "file", "x"):       "is not a socket: name that of crius, api.listen",
		filepath.Join("/none", "x"): "no server at /none/x: start it",
	} {
		if code, out, errs := crius(t, "--api-listen", path, "pods"); code != 1 || out != "" || !strings.Contains(errs, want) {
			t.Errorf("%s: exit code %d, %q, %q, want %q", path, code, out, errs, want)
		}
	}
}
