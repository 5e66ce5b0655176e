package oci

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	testprogram "github.com/crius-run/crius/test/kit/program"
)

// A shim that does not have -v, such as Kata 1's, is one of unknown version,
// and its list of flags is not shown. A program that does not run is no shim.
func TestShimWithoutVersion(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"crius-conmon": "", "crius-conmon-shim": "",
		"containerd-shim-kata-v2": "echo 'flag provided but not defined: -v' >&2; echo 'Usage of shim:' >&2; exit 2",
		"dies":                    "kill -9 $$",
	} {
		if err := testprogram.Write(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text+"\n")); err != nil {
			t.Fatal(err)
		}
	}
	table, err := NewTable(Config{DefaultHandler: "old", Monitor: filepath.Join(dir, "crius-conmon"), MonitorCgroup: "/m", Handlers: map[string]Handler{
		"old":  {Type: "shim", Path: filepath.Join(dir, "containerd-shim-kata-v2")},
		"dies": {Type: "shim", Path: filepath.Join(dir, "dies")},
	}}, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	reports, errs := table.Report(t.Context()) // by name
	if !errors.Is(errs[0], fault.Unavailable) {
		t.Errorf("a program that is killed is a shim: %+v, %v", reports[0], errs[0])
	}
	if r := reports[1]; errs[1] != nil || r.Version != "containerd-shim-kata-v2 of unknown version" || !r.Sandboxed || !r.Ready {
		t.Errorf("%+v, %v", r, errs[1])
	}
}

// A shim is told to be older than containerd 2.3 only if it is certain.
func TestShimsBeforeBootstrap(t *testing.T) {
	t.Parallel()
	for shim, older := range map[string]bool{
		"containerd-shim-runc-v2 1.6.20~ds1": true, "containerd-shim-runc-v2 v2.2.1": true,
		"containerd-shim-runc-v2 v2.3.0": false, "containerd-shim-runc-v2 v3.0.0-beta.1": false,
		"containerd-shim-runc-v2": false, "containerd-shim-runc-v2 1.7.0+unknown": true,
		"containerd-shim-runsc-v1 <none>": true,
		"containerd-shim-kata-v2 1.0":     false, "containerd-shim-kata-v2 of unknown version": false, "": false,
	} {
		if got := beforeBootstrap(shim); got != older {
			t.Errorf("%q: %v", shim, got)
		}
	}
}
