package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/cmd/crius/config"
)

func TestGeneratedFilesAreFresh(t *testing.T) {
	dir := t.TempDir()
	if code, _, errs := crius(t, "generate", dir); code != 0 {
		t.Fatal(errs)
	}
	for path := range generated(newRoot()) {
		want, err := os.ReadFile(filepath.Join(dir, path))
		if err != nil {
			t.Error(err)
			continue
		}
		got, err := os.ReadFile(filepath.Join("../..", path))
		if err != nil || string(got) != string(want) {
			t.Errorf("%s is out of date: run make generate (%v)", path, err)
		}
	}
}

func TestGenerateNeedsAPlace(t *testing.T) {
	if code, _, errs := crius(t, "generate", write(t, "file", "")); code != 1 || errs == "" {
		t.Errorf("generate below a file: exit code %d, error %q", code, errs)
	}
}

func TestManualNamesEverything(t *testing.T) {
	root := newRoot()
	var program, file strings.Builder
	if err := writeProgramPage(&program, root); err != nil {
		t.Fatal(err)
	}
	if err := writeConfigPage(&file); err != nil {
		t.Fatal(err)
	}
	for _, s := range config.Schema() {
		for _, k := range s.Keys {
			if !strings.Contains(file.String(), "\\fB"+roff(k.Name())+"\\fR") {
				t.Errorf("crius.toml(5) lacks %s", k.Path)
			}
			if flag := roff("--" + k.Flag()); !strings.Contains(k.Path, "NAME") && !strings.Contains(program.String(), "\\fB"+flag+"\\fR") {
				t.Errorf("crius(8) lacks --%s", k.Flag())
			}
		}
	}
	for _, c := range root.Commands() {
		if listed := strings.Contains(program.String(), "\n\\fB"+roff(c.Use)+"\\fR"); listed == c.Hidden {
			t.Errorf("crius(8) and the command %s: listed %v, hidden %v", c.Name(), listed, c.Hidden)
		}
	}
}

// TestManualIsTroff checks that groff reads the pages without warnings.
func TestManualIsTroff(t *testing.T) {
	groff, err := exec.LookPath("groff")
	if err != nil {
		t.Fatalf("groff is missing, run make setup: %v", err)
	}
	for name, shown := range map[string][]string{
		"crius.8": {"/var/lib/crius", "0o660"}, "crius.toml.5": {"/var/lib/crius", "0o660"},
		"crius-conmon.8": {"/var/lib/crius"}, "crius-conmon-shim.8": {"/var/lib/crius"},
		"crius-unpack.8": {"/var/lib/containers"},
	} {
		page, err := filepath.Abs(filepath.Join("../../docs/man", name))
		if err != nil {
			t.Fatal(err)
		}
		var complaints strings.Builder
		cmd := exec.Command(groff, "-man", "-Tutf8", "-P-cbou", "-ww", page)
		cmd.Stderr = &complaints
		out, err := cmd.Output()
		if err != nil || complaints.Len() > 0 {
			t.Errorf("%s: %v\n%s", name, err, complaints.String())
		}
		for _, want := range append(shown, "NAME") {
			if !strings.Contains(string(out), want) {
				t.Errorf("%s shows no %q", name, want)
			}
		}
	}
}

func TestRoff(t *testing.T) {
	for text, want := range map[string]string{
		"plain":           "plain",
		".TH":             `\&.TH`,
		"'quoted'":        `\(aqquoted\(aq`,
		`a\fBb`:           `a\efBb`,
		"--flag `x` ~ ^y": `\-\-flag \(gax\(ga \(ti \(hay`,
	} {
		if got := roff(text); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}
