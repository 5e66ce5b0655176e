package main

import (
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
)

// clientCommands only ask a running server.
var clientCommands = []string{"status", "pulls", "pull image", "events", "logs pod", "exec pod -- true", "top", "images"}

// Who asks a server that does not run is told to start it, and why it may have ended.
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

// They do with what they can read of a broken configuration.
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

// What a server answers is shown without the frame of gRPC.
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
