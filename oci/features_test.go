package oci

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	testprogram "github.com/crius-run/crius/test/kit/program"
)

const idMaps = `{"ociVersionMin":"1.0.0","ociVersionMax":"1.2.0","mountOptions":["rro"],"linux":{"mountExtensions":{"idmap":{"enabled":true}}}}`

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "features.json")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A handler's file replaces what its runtime would report, whatever drives the
// runtime, and `features` is not run then.
func TestFeaturesFile(t *testing.T) {
	dir := t.TempDir()
	monitor := filepath.Join(dir, "crius-conmon")
	for _, name := range []string{monitor, filepath.Join(dir, "crius-conmon-shim")} {
		if err := testprogram.Write(name, []byte("#!/bin/sh\n")); err != nil {
			t.Fatal(err)
		}
	}
	ran := filepath.Join(dir, "ran")
	runc := script(t, `case $1 in --version) echo "runc version 1.2.3";; features) touch `+ran+`; echo '{"ociVersionMax":"1.0.0"}';; esac`)
	file := write(t, idMaps)
	for name, h := range map[string]Handler{
		"oci":          {Type: "oci", Path: runc},
		"shim":         {Type: "shim", Path: script(t, `echo containerd-shim-kata-v2:`)},
		"shim of runc": {Type: "shim", Path: script(t, `echo containerd-shim-runc-v2:`), Options: []string{"--BinaryName=" + runc}},
	} {
		for _, from := range []string{"", file} {
			h.Features = from
			table, err := NewTable(Config{DefaultHandler: "h", Monitor: monitor, MonitorCgroup: "/m", Handlers: map[string]Handler{"h": h}}, t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			reports, errs := table.Report(t.Context())
			r := reports[0]
			if errs[0] != nil || !r.Ready || r.UserNamespaces != (from != "") || r.RecursiveReadOnly != (from != "") || r.FeaturesFile != from {
				t.Errorf("%s, features of %q: %+v, %v", name, from, r, errs[0])
			}
			if _, err := os.Stat(ran); (err == nil) != (from == "" && name != "shim") {
				t.Errorf("%s, features of %q: whether features was run: %v", name, from, err)
			}
			_ = os.Remove(ran)
		}
	}
}

// An invalid file is reported before anything changes; a changed file takes
// effect after a reload.
func TestFeaturesFileReloaded(t *testing.T) {
	runc := script(t, `echo "runc version 1.2.3"`)
	file := write(t, `{"ociVersionMax":"1.0.0"}`)
	cfg := Config{DefaultHandler: "h", Monitor: "/bin/true", MonitorCgroup: "/m", Handlers: map[string]Handler{"h": {Type: "oci", Path: runc, Features: file}}}
	table, err := NewTable(cfg, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	able := func() bool { reports, _ := table.Report(t.Context()); return reports[0].UserNamespaces }
	if able() {
		t.Error("it can do what the file does not say")
	}
	for _, bad := range []string{"", "{", `{"mountOptions":["rro"]}`, `{"ociVersionMax":1}`} {
		if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := table.Reload(cfg); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "runtime.handlers.h.features: "+file) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if reports, errs := table.Report(t.Context()); errs[0] != nil || !reports[0].Ready {
		t.Errorf("a file that has become bad since: %+v, %v", reports, errs)
	}
	if err := os.WriteFile(file, []byte(idMaps), 0o600); err != nil {
		t.Fatal(err)
	}
	if able() {
		t.Error("the file is in force before it is reloaded")
	}
	if err := table.Reload(cfg); err != nil || !able() {
		t.Errorf("after a reload: %v", err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := table.Reload(cfg); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "runtime.handlers.h.features") {
		t.Errorf("without the file: %v", err)
	}
}

// Whatever a runtime prints as its features, crius's result can be encoded and
// read again.
func FuzzFeatures(f *testing.F) {
	for _, text := range []string{idMaps, "{}", "null", `{"ociVersionMax":"1.0.0","linux":{"mountExtensions":{"idmap":{}}}}`, `{"ociVersionMax":"\ud800","mountOptions":["rro",null]}`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		known, err := parseFeatures(text)
		if err != nil {
			return
		}
		var a, b Abilities
		a.believe(known)
		again, err := json.Marshal(known)
		if err != nil {
			t.Fatal(err)
		}
		if known, err = parseFeatures(again); err != nil {
			t.Fatalf("%s became %s: %v", text, again, err)
		}
		if b.believe(known); a.RecursiveReadOnly != b.RecursiveReadOnly || a.IDMap != b.IDMap || a.CgroupNamespaces != b.CgroupNamespaces {
			t.Errorf("%s became %s", text, again)
		}
	})
}
