package oci

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	testprogram "github.com/crius-run/crius/test/kit/program"
)

// The page on handlers says where the stats of a container come from: from its cgroup or, if its
// pod is a runtime sandbox, from the runtime. Those of a pod always come from its cgroup, in which a
// virtual machine is not always.
func TestStatsInTheManual(t *testing.T) {
	t.Parallel()
	manual, err := os.ReadFile("../docs/handlers.md")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	program := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := testprogram.Write(path, []byte("#!/bin/sh\n"+text+"\n")); err != nil {
			t.Fatal(err)
		}
		return path
	}
	monitor := program("crius-conmon", "")
	program("crius-conmon-shim", "")
	reports := func(name, version string) string { return program(name, "echo '"+version+"'") }
	for row, handlers := range map[string][]Handler{
		"runc, crun, youki": {
			{Type: "oci", Path: reports("runc", "runc version 1.3.0")},
			{Type: "oci", Path: reports("crun", "crun version 1.8.1")},
			{Type: "oci", Path: reports("youki", "youki version: 0.5.3")},
		},
		"gVisor, by runsc":            {{Type: "oci", Path: reports("runsc", "runsc version release-20260527.0")}},
		"gVisor, by its shim":         {{Type: "shim", Path: reports("containerd-shim-runsc-v1", "containerd-shim-runsc-v1:")}},
		"Kata 1, by its command line": {{Type: "oci", Path: reports("kata-runtime", "kata-runtime  : 1.13.0-alpha0")}},
		"any other shim":              {{Type: "shim", Path: reports("containerd-shim-kata-v2", "containerd-shim-kata-v2:")}},
	} {
		var cells []string
		for line := range strings.Lines(string(manual)) {
			if strings.HasPrefix(line, "| "+row+" |") { // the last table is that of sizes
				cells = strings.Split(line, "|")
			}
		}
		if len(cells) != 7 {
			t.Errorf("the manual has no row %q", row)
			continue
		}
		ofContainer, ofPod, _ := strings.Cut(strings.TrimSpace(cells[5]), "; ")
		for _, h := range handlers {
			table, err := NewTable(Config{DefaultHandler: "h", Monitor: monitor, MonitorCgroup: "/m", Handlers: map[string]Handler{"h": h}}, t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			r, err := table.Get("h")
			if err != nil {
				t.Fatal(err)
			}
			a, err := r.Probe(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			account := "its cgroup"
			switch {
			case a.VirtualMachine && h.Type == "shim":
				account = "the shim's account"
			case a.VirtualMachine:
				account = "the guest's account"
			case a.Sandboxed:
				account = "gVisor's account"
			}
			if ofContainer != account {
				t.Errorf("%s, %s: stats of a container are %q, the manual says %q", row, h.Path, account, ofContainer)
			}
			if outside := strings.HasSuffix(ofPod, ", if the machine is in it"); !strings.HasPrefix(ofPod, "the pod's cgroup") || outside != a.VirtualMachine {
				t.Errorf("%s, %s: the manual says of the pod %q", row, h.Path, ofPod)
			}
		}
	}
}
