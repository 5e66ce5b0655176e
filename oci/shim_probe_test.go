package oci

import (
	"errors"
	"path/filepath"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

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
		"containerd-shim-runsc-v1": "echo $0:; echo '  Version:  <none>'",
		"containerd-shim-kata-v2":  "echo 'flag provided but not defined: -v' >&2; echo 'Usage of shim:' >&2; exit 2",
		"dies":                     "kill -9 $$",
	} {
		if err := testprogram.Write(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text+"\n")); err != nil {
			t.Fatal(err)
		}
	}
	table, err := NewTable(Config{DefaultHandler: "old", Monitor: filepath.Join(dir, "crius-conmon"), MonitorCgroup: "/m", Handlers: map[string]Handler{
		"old":    {Type: "shim", Path: filepath.Join(dir, "containerd-shim-kata-v2")},
		"dies":   {Type: "shim", Path: filepath.Join(dir, "dies")},
		"gvisor": {Type: "shim", Path: filepath.Join(dir, "containerd-shim-runsc-v1")},
	}}, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	reports, errs := table.Report(t.Context()) // by name
	if !errors.Is(errs[0], fault.Unavailable) {
		t.Errorf("a program that is killed is a shim: %+v, %v", reports[0], errs[0])
	}
	for name, machine := range map[string]bool{"old": true, "gvisor": false} {
		r, err := table.Get(name)
		if err != nil {
			t.Fatal(err)
		}
		if a, err := r.Probe(t.Context()); err != nil || !a.Sandboxed || a.VirtualMachine != machine {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
	if r := reports[2]; errs[2] != nil || r.Version != "containerd-shim-kata-v2 of unknown version" || !r.Sandboxed || !r.Ready {
		t.Errorf("%+v, %v", r, errs[2])
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

// gVisor's shim is told of a cgroup in which it finds no other that it would
// take for the pod's.
func TestKeepInCgroup(t *testing.T) {
	t.Parallel()
	for asked, want := range map[string]string{
		"/kubepods/burstable/pod1-2/crius-a": "/kubepods/burstable/pod1-2/crius-a/pod",
		"/pods/crius-a":                      "/pods/crius-a/pod",
		"/crius/crius-a":                     "/crius/crius-a",
		"kubepods-pod1.slice:crius:a":        "kubepods-pod1.slice:crius:a", // of systemd
		"":                                   "",
	} {
		spec := &specs.Spec{Linux: &specs.Linux{CgroupsPath: asked}}
		if keepInCgroup(spec); spec.Linux.CgroupsPath != want {
			t.Errorf("%q became %q", asked, spec.Linux.CgroupsPath)
		}
	}
}
