package lsm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/program"
)

// parser replaces apparmor_parser, which does not work on a kernel without
// AppArmor, with a script.
func parser(t *testing.T, script string) {
	t.Helper()
	dir := t.TempDir()
	if script != "" {
		if err := program.Write(filepath.Join(dir, "apparmor_parser"), []byte("#!/bin/sh\n"+script)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
}

func TestLoadDefaultProfile(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	parser(t, "{ echo \"$@\"; while read -r line; do echo \"$line\"; done; } >"+out)
	if err := LoadDefaultProfile(t.Context()); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"--replace", "\nprofile crius-default flags=(", "peer=crius-default,", "peer=crius-default//&{runc,crun},", "deny mount,", "\n}\n"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the parser did not get %q:\n%s", want, text)
		}
	}
}

func TestListed(t *testing.T) {
	const list = "crius-default (enforce)\n/usr/bin/man (enforce)\nmy profile (complain)\n"
	for name, want := range map[string]bool{"crius-default": true, "my profile": true, "crius": false, "default": false, "": false, "none": false} {
		if got := listed(list, name); got != want {
			t.Errorf("%q: %t", name, got)
		}
	}
}

func TestLoadDefaultProfileFails(t *testing.T) {
	parser(t, "echo AppArmor parser error at line 3 >&2; exit 1")
	if err := LoadDefaultProfile(t.Context()); err == nil || !strings.Contains(err.Error(), "error at line 3") {
		t.Errorf("a parser that refuses: %v", err)
	}
	parser(t, "")
	if err := LoadDefaultProfile(t.Context()); !errors.Is(err, fault.Unavailable) {
		t.Errorf("no parser: %v", err)
	}
	parser(t, "exec /bin/sleep 1000")
	soon, cancel := context.WithTimeoutCause(t.Context(), 10*time.Millisecond, fault.Timeout)
	defer cancel()
	if err := LoadDefaultProfile(soon); !errors.Is(err, fault.Timeout) {
		t.Errorf("a parser that hangs: %v", err)
	}
}

// A profile is loaded if a line of the list has its complete name, with its
// mode.
func FuzzListed(f *testing.F) {
	f.Add("crius-default (enforce)\n", "my profile", "complain")
	f.Add("a (b) (enforce)\n", "a (b)", "enforce")
	f.Add("\n (x)\n", "", "")
	f.Fuzz(func(t *testing.T, list, name, mode string) {
		if strings.ContainsAny(name+mode, "\n") || strings.Contains(mode, " (") {
			return
		}
		if list != "" && !strings.HasSuffix(list, "\n") {
			list += "\n"
		}
		if !listed(list+name+" ("+mode+")\n", name) {
			t.Errorf("%q is not found after %q", name, list)
		}
		if listed(list, name) && !strings.Contains("\n"+list, "\n"+name+" (") {
			t.Errorf("%q is found in %q", name, list)
		}
	})
}
