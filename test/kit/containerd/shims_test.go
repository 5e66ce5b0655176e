package containerd

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// leave makes the socket of a process that has died.
func leave(t *testing.T, path string) {
	t.Helper()
	l := listen(t, path)
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func listen(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// binary stands in for containerd's.
func binary(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "containerd")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// Sockets of other shims stay, live or not.
func TestOnlyNewShimsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	leave(t, filepath.Join(dir, "dead"))
	listen(t, filepath.Join(dir, "live"))
	s, err := noteShims(dir, filepath.Join(dir, "none"), binary(t))
	if err != nil {
		t.Fatal(err)
	}
	leave(t, filepath.Join(dir, "new"))
	if err := s.remove(); err != nil {
		t.Error(err)
	}
	names, err := namesIn(dir)
	if err != nil || len(names) != 2 || names[0] != "dead" || names[1] != "live" {
		t.Errorf("%q, %v are left", names, err)
	}
}

func TestTheDirectoryOfShimsGoesIfItIsNew(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "s")
	s, err := noteShims(dir, dir, binary(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.remove(); err != nil {
		t.Errorf("no shim has ever been there: %v", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	leave(t, filepath.Join(dir, "new"))
	if err := s.remove(); err != nil {
		t.Error(err)
	}
	if names, err := namesIn(dir); err != nil || names != nil {
		t.Errorf("%q, %v are left", names, err)
	}
}

func TestAnotherContainerdIsRefused(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "containerd.sock")
	listen(t, socket)
	if _, err := noteShims(t.TempDir(), socket, binary(t)); err == nil {
		t.Error("its shims would be taken for its own")
	}
}

func TestAnotherRunIsRefused(t *testing.T) {
	dir, file := t.TempDir(), binary(t)
	first, err := noteShims(dir, filepath.Join(dir, "none"), file)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := noteShims(dir, filepath.Join(dir, "none"), file); err == nil {
		t.Error("its shims would be taken for its own")
	}
	if err := first.remove(); err != nil {
		t.Fatal(err)
	}
	second, err := noteShims(dir, filepath.Join(dir, "none"), file)
	if err != nil {
		t.Fatalf("after the first has ended: %v", err)
	}
	if err := second.remove(); err != nil {
		t.Error(err)
	}
}

func TestResultsOfTheNodeAreForgotten(t *testing.T) {
	dir := t.TempDir()
	for name, netns := range map[string]string{"ours": "/tmp/cr234567/ctdrun/netns/x", "other": "/tmp/cr2345678/ctdrun/netns/x", "host": "/run/netns/x"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(`{"sandbox": "`+netns+`"}`), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := forgetResults(dir, "/tmp/cr234567"); err != nil {
		t.Error(err)
	}
	if left, err := namesIn(dir); err != nil || !slices.Equal(left, []string{"host", "other"}) {
		t.Errorf("%q, %v are left", left, err)
	}
	if err := forgetResults(filepath.Join(dir, "none"), "/tmp/cr234567"); err != nil {
		t.Errorf("where there are none: %v", err)
	}
}
