package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/server/control"
	"github.com/crius-run/crius/test/kit/wait"
)

func TestStatusDumps(t *testing.T) {
	run := t.TempDir()
	s, err := control.Listen(t.Context(), filepath.Join(run, "control.sock"), control.Node{})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	for kind, want := range map[string]string{"goroutines": "TestStatusDumps(", "heap": "\x1f\x8b"} {
		if code, out, errs := crius(t, "--run-root", run, "status", kind); code != 0 || !strings.Contains(out, want) {
			t.Errorf("crius status %s: exit code %d, %q, %.100q", kind, code, errs, out)
		}
	}
	if code, out, errs := crius(t, "--run-root", run, "status", "cpu", "1"); code != 0 || !strings.HasPrefix(out, "\x1f\x8b") {
		t.Errorf("crius status cpu: exit code %d, %q, %.20q", code, errs, out)
	}
	for _, seconds := range []string{"0", "-1", "601", "1.5", "1m", " "} {
		if code, _, errs := crius(t, "--run-root", run, "status", "cpu", "--", seconds); code == 0 || !strings.Contains(errs, "from 1 to 600") {
			t.Errorf("crius status cpu %s: exit code %d, %q", seconds, code, errs)
		}
	}
	// The server is found even though the file has become invalid.
	broken := write(t, "broken.toml", "run_root = '"+run+"'\nlisen = 1\n")
	code, out, errs := crius(t, "--config", broken, "status", "heap")
	if code != 0 || !strings.HasPrefix(out, "\x1f\x8b") || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, "lisen") ||
		!strings.Contains(errs, run) || !strings.Contains(errs, "/run/crius/crius.sock (default)") {
		t.Errorf("with a broken configuration: exit code %d, %q, %.20q", code, errs, out)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Error(err)
	}
	<-served
	for _, command := range [][]string{{"wipe", "--yes"}, {"check"}, {"config"}, {"serve"}} {
		if code, _, errs := crius(t, append([]string{"--config", broken}, command...)...); code == 0 || !strings.Contains(errs, "lisen") || strings.Contains(errs, "warning") {
			t.Errorf("crius %s takes a broken configuration: exit code %d, %q", command, code, errs)
		}
	}
	if code, _, errs := crius(t, "--config", run+"/none", "status"); code != 1 || !strings.Contains(errs, "no such file") {
		t.Errorf("a file that was named and is missing: exit code %d, %q", code, errs)
	}
	if code, _, errs := crius(t, "--run-root", run, "status", "heap"); code != 1 || !strings.Contains(errs, run) {
		t.Errorf("without a server: exit code %d, %q", code, errs)
	}
}

// Each signal replaces the file of the one before, or a symbolic link in its place.
func TestSignalSavesStacks(t *testing.T) {
	run := t.TempDir()
	path, other := filepath.Join(run, stacksFile), write(t, "other", "kept")
	if err := os.Symlink(other, path); err != nil {
		t.Fatal(err)
	}
	stop := onSignal(t.Context(), unix.SIGUSR1, func(ctx context.Context) { saveStacks(ctx, run) })
	defer stop()
	if err := unix.Kill(os.Getpid(), unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	var info os.FileInfo
	if !wait.Until(t.Context(), func() bool {
		info, _ = os.Lstat(path)
		return info != nil && info.Mode().IsRegular()
	}) {
		t.Fatalf("no stacks saved: %v", info)
	}
	if text, err := os.ReadFile(path); err != nil || !strings.Contains(string(text), "TestSignalSavesStacks(") || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v: %.200s", err, info.Mode(), text)
	}
	if text, err := os.ReadFile(other); err != nil || string(text) != "kept" {
		t.Errorf("wrote through a link: %q, %v", text, err)
	}
}
