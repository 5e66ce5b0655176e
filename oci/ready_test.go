package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
	testprogram "github.com/crius-run/crius/test/kit/program"
)

func wantNotReady(t *testing.T, table *Table, reason error, words ...string) {
	t.Helper()
	first, second := table.Ready(t.Context()), table.Ready(t.Context())
	if !errors.Is(first, reason) || second == nil || first.Error() != second.Error() {
		t.Errorf("%v, then %v; want %v twice", first, second, reason)
		return
	}
	for _, word := range words {
		if !strings.Contains(first.Error(), word) {
			t.Errorf("%q does not say %q", first, word)
		}
	}
}

// Without the monitor program no handler can create a container (O6).
func TestNotReadyWithoutMonitor(t *testing.T) {
	monitor := filepath.Join(t.TempDir(), "crius-conmon")
	table, err := NewTable(Config{DefaultHandler: "h", CgroupDriver: "systemd", Monitor: monitor, MonitorCgroup: "/m",
		Handlers: map[string]Handler{"h": {Type: "oci", Path: script(t, "echo runc version 1.2.3")}}}, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	wantNotReady(t, table, fault.Unavailable, monitor, "no such file", "runtime.monitor")
	if err := testprogram.Write(monitor, []byte("#!/bin/sh\n")); err != nil {
		t.Fatal(err)
	}
	if err := table.Ready(t.Context()); err != nil {
		t.Error(err)
	}
	if err := os.Chmod(monitor, 0o600); err != nil {
		t.Fatal(err)
	}
	wantNotReady(t, table, fault.Unavailable, monitor, "permission denied")
}

// The default handler alone decides (D1).
func TestReadyIsTheDefaultHandlers(t *testing.T) {
	table := tableOf(t, map[string]Handler{
		"a": {Type: "oci", Path: script(t, "echo runc version 1.2.3")},
		"b": {Type: "oci", Path: "/bin/false"}, "c": {Type: "oci", Path: "/nowhere/runtime"}, "d": {Type: "oci", Path: "no-such-runtime"},
	})
	if err := table.Ready(t.Context()); err != nil {
		t.Error(err)
	}
	for path, word := range map[string]string{"/bin/false": "exit status 1", "/nowhere/runtime": "no such file", "no-such-runtime": "PATH"} {
		table := tableOf(t, map[string]Handler{"a": {Type: "oci", Path: path}, "b": {Type: "oci", Path: "true"}})
		wantNotReady(t, table, fault.Unavailable, "handler a", path, word)
	}
}

// A runtime that would ignore the CPU affinity of exec processes creates no
// containers for a handler that sets it.
func TestExecAffinityNeedsItsRuntime(t *testing.T) {
	for answer, able := range map[string]bool{
		"runc version 1.2.9": false, "runc version 1.3.0": true, "runc version 2.0.0": true,
		"crun version 1.18.2": false, "crun version 1.19": true, "crun version 1.20.1": true,
		"runsc version release-20260527.0": false, "youki version 0.5.5": false,
	} {
		for _, asked := range []string{"", FirstCPU} {
			table := tableOf(t, map[string]Handler{"a": {Type: "oci", Path: script(t, "echo "+answer), ExecCPUAffinity: asked}})
			if able || asked == "" {
				if err := table.Ready(t.Context()); err != nil {
					t.Errorf("%s, affinity %q: %v", answer, asked, err)
				}
				continue
			}
			wantNotReady(t, table, fault.Unavailable, "handler a", "exec_cpu_affinity needs runc 1.3", answer)
			wantNoCreate(t, table, answer)
		}
	}
	// For a shim its runtime is what counts.
	dir := t.TempDir()
	for _, name := range []string{"crius-conmon", "crius-conmon-shim"} {
		if err := testprogram.Write(filepath.Join(dir, name), []byte("#!/bin/sh\n")); err != nil {
			t.Fatal(err)
		}
	}
	shim := Handler{Type: "shim", Path: script(t, "echo containerd-shim-runc-v2:"), Options: []string{"--BinaryName=" + script(t, "echo runc version 1.2.9")}, ExecCPUAffinity: FirstCPU}
	table, err := NewTable(Config{DefaultHandler: "a", Monitor: filepath.Join(dir, "crius-conmon"), MonitorCgroup: "/m", Handlers: map[string]Handler{"a": shim}}, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	wantNotReady(t, table, fault.Unavailable, "runc version 1.2.9")
	wantNoCreate(t, table, "runc version 1.2.9")
}

func wantNoCreate(t *testing.T, table *Table, version string) {
	t.Helper()
	r, err := table.Get("")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	spec := &specs.Spec{Linux: &specs.Linux{}}
	if _, err := r.Create(t.Context(), Ref{ID: "x", Dir: dir}, spec, IO{}); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), version) {
		t.Errorf("create: %v", err)
	}
	if made, err := os.ReadDir(dir); err != nil || len(made) > 0 {
		t.Errorf("create has made %v, %v", made, err)
	}
	reports, errs := table.Report(t.Context())
	if reports[0].Ready || reports[0].Error == "" || errs[0] == nil || reports[0].Version == "" {
		t.Errorf("reported as %+v, %v", reports[0], errs)
	}
}

// Existing containers are not affected: here the runtime is asked to delete
// one.
func TestExecAffinityAndContainersThatAreThere(t *testing.T) {
	asked, root, id := filepath.Join(t.TempDir(), "asked"), t.TempDir(), strings.Repeat("a", 64)
	runtime := script(t, `[ "$1" = --version ] && echo runc version 1.2.9; echo "$@" >> `+asked)
	table := tableOf(t, map[string]Handler{"a": {Type: "oci", Path: runtime, Root: root, ExecCPUAffinity: FirstCPU}})
	r, err := table.Get("")
	if err == nil {
		err = os.Mkdir(filepath.Join(root, id), 0o700)
	}
	if err == nil {
		err = r.(*cli).forget(t.Context(), Ref{ID: id, Dir: t.TempDir()})
	}
	if err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(asked); err != nil || !strings.Contains(string(text), "delete --force "+id) {
		t.Errorf("the runtime was asked: %s, %v", text, err)
	}
}

// hanging is a runtime that answers only once its file hang has been removed.
func hanging(t *testing.T, path string) (hang string) {
	t.Helper()
	hang = filepath.Join(t.TempDir(), "hang")
	text := fmt.Sprintf("#!/bin/sh\nwhile [ -e %s ]; do sleep 0.02; done; echo runc version 2.0.0\n", hang)
	if err := errors.Join(os.WriteFile(hang, nil, 0o600), testprogram.Write(path, []byte(text))); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(hang) })
	return hang
}

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// A default runtime that hangs after it was replaced counts as before; one that
// has never answered is not ready until it does. It is run only once, however
// often it is asked.
func TestHangingRuntime(t *testing.T) {
	path := script(t, "echo runc version 1.0.0")
	table := tableOf(t, map[string]Handler{"a": {Type: "oci", Path: path}})
	if err := table.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	hang := hanging(t, path)
	for range 2 {
		if err := table.Ready(soon(t)); err != nil {
			t.Errorf("ready before, hangs now: %v", err)
		}
	}
	fresh := tableOf(t, map[string]Handler{"a": {Type: "oci", Path: path}})
	first, second := fresh.Ready(soon(t)), fresh.Ready(soon(t))
	if !errors.Is(first, fault.Timeout) || !strings.Contains(first.Error(), path) || second == nil || first.Error() != second.Error() {
		t.Errorf("never ready: %v, then %v", first, second)
	}
	if err := os.Remove(hang); err != nil {
		t.Fatal(err)
	}
	for _, table := range []*Table{table, fresh} {
		r, err := table.Get("")
		if err != nil {
			t.Fatal(err)
		}
		if a, err := r.Probe(t.Context()); err != nil || a.Version != "runc version 2.0.0" {
			t.Errorf("%+v, %v", a, err)
		}
		if err := table.Ready(soon(t)); err != nil {
			t.Error(err)
		}
	}
}

// A default runtime that fails after it was replaced is not ready while the
// next one hangs.
func TestHangingRuntimeAfterABrokenOne(t *testing.T) {
	path := script(t, "echo runc version 1.0.0")
	table := tableOf(t, map[string]Handler{"a": {Type: "oci", Path: path}})
	if err := table.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(path), testprogram.Write(path, []byte("#!/bin/sh\nexit 1\n"))); err != nil {
		t.Fatal(err)
	}
	wantNotReady(t, table, fault.Unavailable, "exit status 1")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	hang := hanging(t, path)
	if err := table.Ready(soon(t)); !errors.Is(err, fault.Timeout) {
		t.Errorf("hangs: %v", err)
	}
	if err := errors.Join(os.Remove(hang), table.Ready(t.Context())); err != nil {
		t.Error(err)
	}
}
