package oci

import (
	"context"
	"path/filepath"
	"slices"
	"testing"

	testprogram "github.com/crius-run/crius/test/kit/program"
)

// program is a shell script.
func program(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := testprogram.Write(path, []byte("#!/bin/sh\n"+text+"\n")); err != nil {
		t.Fatal(err)
	}
	return path
}

// A table reports the vulnerabilities of its runtimes, including runc behind a
// shim, without those that are configured as backported.
func TestReportNamesVulnerabilities(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	old := program(t, dir, "runc", `case $1 in --version) echo "runc version 1.1.5";; *) exit 1;; esac`)
	shim := program(t, dir, "containerd-shim-runc-v2", `echo "containerd-shim-runc-v2:"; echo "  Version:  2.0.0"`)
	program(t, dir, "crius-conmon", "exit 0")
	program(t, dir, "crius-conmon-shim", "exit 0")
	cfg := Config{DefaultHandler: "old", CgroupDriver: "cgroupfs", Monitor: filepath.Join(dir, "crius-conmon"), MonitorCgroup: "/x", Handlers: map[string]Handler{
		"old":  {Type: "oci", Path: old},
		"shim": {Type: "shim", Path: shim, Options: []string{"--BinaryName=" + old}},
	}}
	table, err := NewTable(cfg, dir)
	if err != nil {
		t.Fatal(err)
	}
	if known := table.Vulnerable(); len(known) != 0 {
		t.Errorf("before anybody has asked: %v", known)
	}
	count := func() (counts []int) {
		reports, errs := table.Report(context.Background())
		for i, r := range reports {
			if errs[i] != nil {
				t.Error(errs[i])
			}
			counts = append(counts, len(r.Vulnerabilities))
		}
		return counts
	}
	if got := count(); !slices.Equal(got, []int{5, 5}) {
		t.Errorf("vulnerabilities: %v", got)
	}
	cfg.BackportedCVEs = []string{"CVE-2024-21626", "CVE-2025-31133", "CVE-2025-52565", "CVE-2025-52881"}
	if err := table.Reload(cfg); err != nil {
		t.Fatal(err)
	}
	if got := count(); !slices.Equal(got, []int{1, 1}) {
		t.Errorf("vulnerabilities that are not backported: %v", got)
	}
	if known := table.Vulnerable(); len(known) != 2 || !slices.Equal(known["shim"], []string{"CVE-2026-41579"}) {
		t.Errorf("by handler: %v", known)
	}
}
