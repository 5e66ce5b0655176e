package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	testprogram "github.com/crius-run/crius/test/kit/program"
)

// A file that a handler names and that is missing keeps neither the server from starting nor
// other handlers from being used, unless it is that of the default one.
func TestHandlerWithMissingFileIsRefusedAlone(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none")
	runc := script(t, "echo runc version 1.2.3")
	for says, broken := range map[string]Handler{
		"runtime.handlers.b.features: " + none:                        {Type: "oci", Path: runc, Features: none},
		"runtime.handlers.b.seccomp_profile: seccomp profile " + none: {Type: "oci", Path: runc, SeccompProfile: none},
		"runtime.handlers.b.base_runtime_spec: " + none:               {Type: "oci", Path: runc, BaseRuntimeSpec: none},
	} {
		well := Handler{Type: "oci", Path: runc}
		cfg := Config{DefaultHandler: "a", Monitor: "/bin/true", MonitorCgroup: "/m", Handlers: map[string]Handler{"a": well, "b": broken}}
		table, err := NewTable(cfg, t.TempDir())
		if err != nil {
			t.Errorf("%s: %v", says, err)
			continue
		}
		if err := table.Ready(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := must(table.Get("b")).Probe(t.Context()); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
		reports, _ := table.Report(t.Context())
		if !reports[0].Ready || reports[1].Ready || !strings.Contains(reports[1].Error, says) {
			t.Errorf("%s: reported as %+v", says, reports)
		}
		if err := table.Reload(cfg); err == nil || !strings.Contains(err.Error(), says) { // all or none
			t.Errorf("%s: reload: %v", says, err)
		}
		cfg.DefaultHandler = "b"
		if _, err := NewTable(cfg, t.TempDir()); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: as the default: %v", says, err)
		}
	}
}

// Without the program that calls shims there is a table, and the runtime of pods that exist. Handlers of
// shims cannot be used until it is there, which needs no reload.
func TestProgramOfShimsIsLookedForAtEachUse(t *testing.T) {
	dir := t.TempDir()
	kata := Handler{Type: "shim", Path: script(t, "echo containerd-shim-kata-v2:")}
	cfg := Config{DefaultHandler: "a", Monitor: filepath.Join(dir, "crius-conmon"), MonitorCgroup: "/m", Handlers: map[string]Handler{"a": kata}}
	if err := testprogram.Write(cfg.Monitor, []byte("#!/bin/sh\n")); err != nil {
		t.Fatal(err)
	}
	table := must(NewTable(cfg, t.TempDir()))
	of := must(table.Bind("a", Origin{Handler: kata}))
	for _, r := range []Runtime{must(table.Get("a")), of} {
		if _, err := r.Probe(t.Context()); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "crius-conmon-shim not found in the directory of "+cfg.Monitor) {
			t.Error(err)
		}
	}
	if err := table.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "crius-conmon-shim not found") {
		t.Error(err)
	}
	if err := table.Reload(cfg); err != nil {
		t.Error(err)
	}
	if err := testprogram.Write(filepath.Join(dir, "crius-conmon-shim"), []byte("#!/bin/sh\n")); err != nil {
		t.Fatal(err)
	}
	for _, r := range []Runtime{must(table.Get("a")), of} {
		if _, err := r.Probe(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if err := table.Ready(t.Context()); err != nil {
		t.Error(err)
	}
}

// A handler can be used as soon as its file is there and the configuration is reloaded, which has not
// changed.
func TestRefusedHandlerIsWellAfterReload(t *testing.T) {
	file := filepath.Join(t.TempDir(), "spec.json")
	runc := Handler{Type: "oci", Path: script(t, "echo runc version 1.2.3")}
	other := runc
	other.BaseRuntimeSpec = file
	cfg := Config{DefaultHandler: "a", Monitor: "/bin/true", MonitorCgroup: "/m", Handlers: map[string]Handler{"a": runc, "b": other}}
	table := must(NewTable(cfg, t.TempDir()))
	if err := os.WriteFile(file, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := table.Reload(cfg); err != nil {
		t.Fatal(err)
	}
	if _, err := must(table.Get("b")).Probe(t.Context()); err != nil {
		t.Error(err)
	}
}

// What a pod keeps stays among all runtimes, whatever is reloaded while the pod is made.
func TestBindDuringReload(t *testing.T) {
	h := Handler{Type: "oci", Path: script(t, "echo runc version 1.2.3")}
	cfg := Config{DefaultHandler: "a", Monitor: "/bin/true", MonitorCgroup: "/m", Handlers: map[string]Handler{"a": h}}
	table := must(NewTable(cfg, t.TempDir()))
	for i := range 300 {
		var group sync.WaitGroup
		root := fmt.Sprintf("/root-%d", i)
		group.Go(func() {
			if err := table.Reload(cfg); err != nil {
				t.Error(err)
			}
		})
		group.Go(func() {
			of := h
			of.Root = root
			must(table.Bind("a", Origin{Handler: of}))
		})
		group.Wait()
		var roots []string
		for _, r := range table.All() {
			roots = append(roots, r.Handler().Root)
		}
		if !slices.Contains(roots, root) {
			t.Fatalf("after %d rounds the root of a pod is not among %d", i, len(roots))
		}
	}
}

// If it is not the shim that is gone but the runtime that it runs, the error says so.
func TestRuntimeOfTheShimOfAPodIsGone(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"crius-conmon", "crius-conmon-shim"} {
		if err := testprogram.Write(filepath.Join(dir, name), []byte("#!/bin/sh\n")); err != nil {
			t.Fatal(err)
		}
	}
	runc, shim := script(t, "echo runc version 1.2.9"), script(t, "echo containerd-shim-runc-v2:")
	h := Handler{Type: "shim", Path: shim, Options: []string{"--BinaryName=" + runc}}
	cfg := Config{DefaultHandler: "a", Monitor: filepath.Join(dir, "crius-conmon"), MonitorCgroup: "/m", Handlers: map[string]Handler{"a": h}}
	table := must(NewTable(cfg, dir))
	made := must(table.Get("a"))
	origin := *OriginOf(made.Handler(), must(made.Probe(t.Context())))
	if err := os.Remove(runc); err != nil {
		t.Fatal(err)
	}
	bound := must(must(NewTable(cfg, dir)).Bind("a", origin)) // by the next server
	if _, err := bound.Probe(t.Context()); err == nil || !strings.Contains(err.Error(), runc+", which the shim "+shim+" of the pod runs, is gone") {
		t.Error(err)
	}
}
