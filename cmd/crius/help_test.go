package main

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// Help does not list the flags of options, which would hide the few of the command.
func TestHelpIsShort(t *testing.T) {
	commands := []*cobra.Command{newRoot()}
	for i := 0; i < len(commands); i++ {
		commands = append(commands, commands[i].Commands()...)
	}
	for _, c := range commands {
		if !c.Runnable() {
			continue
		}
		args := append(strings.Fields(c.CommandPath())[1:], "--help")
		code, out, errs := crius(t, args...)
		if lines := strings.Count(out, "\n"); code != 0 || errs != "" || lines > 40 {
			t.Errorf("crius %q: exit code %d, %d lines, want at most 40; %s", args, code, lines, errs)
		}
		if strings.Contains(out, "--network-timeout") || !strings.Contains(out, "--help") || !strings.Contains(out, `"crius help flags"`) {
			t.Errorf("crius %q lists flags of the configuration, or lacks its own and where those are:\n%s", args, out)
		}
	}
}

func TestHelpOfFlags(t *testing.T) {
	code, out, errs := crius(t, "help", "flags")
	if code != 0 || errs != "" {
		t.Fatalf("exit code %d: %s", code, errs)
	}
	for want, listed := range map[string]bool{
		"--network-timeout duration": true, "--api-listen string": true, "(default 2m)": true,
		"--config-dir": false, "--repair": false, "--version": false,
	} {
		if strings.Contains(out, want) != listed {
			t.Errorf("help of flags has %q: %v, want %v", want, !listed, listed)
		}
	}
}

func TestVersionFlag(t *testing.T) {
	_, want, _ := crius(t, "version")
	if code, out, errs := crius(t, "--version"); code != 0 || out != want || errs != "" {
		t.Errorf("crius --version: exit code %d, %q and %q, want %q", code, out, errs, want)
	}
	if code, _, errs := crius(t, "check", "--version"); code != 2 {
		t.Errorf("crius check --version: exit code %d, %q", code, errs)
	}
}
